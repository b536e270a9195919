"""The servers that runs ask: their processes by kind, what these hold, and requests sent to them.

Kinds are the names of the deployments (`engine`, `cn-picks`, ...), `proxy` and `controller` (Serve's own processes),
`gcs` (Ray's control store), `command` (`plait serve` itself) and `ray` (everything else). Memory is what processes hold
in pages that are no file's: pages of libraries and of weights that are mapped come and go as the kernel likes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import socket
import sys
import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import httpx2
import psutil

from plait_bench.benchmark import Reading, ResultRow, Say, Workload
from plait_bench.commands import serving_plait
from plait_bench.errors import SystemFailed
from plait_bench.faults.requests import WEIGHTS, Ask, End, Reply, verdict_of
from plait_bench.images.fleet import status_of, with_descendants
from plait_bench.images.ours import prepared_parts
from plait_loadtest.scenario import Arrivals, ClosedLoopCallers, LoadTarget, RawClass, Scenario, Slo
from plait_loadtest.session import FinishedRun, run_scenario

T = TypeVar("T")

Values: TypeAlias = Mapping[tuple[str, str], ResultRow]
"""Rows by system and metric."""

Usage: TypeAlias = Counter[str]
"""What a server holds at one moment."""

Promise: TypeAlias = tuple[str, float, float]
"""What is promised, what it was, and the most that it may be."""

OTHERS = frozenset({"command", "ray"})
"""Kinds that no run touches: with `plait serve` or Ray itself the server ends, as it says."""

_MARK = "PLAIT_BENCH_RUN"
_REPLICA = "ray::ServeReplica:plait:"
_TITLES = {"ray::ProxyActor": "proxy", "ray::ServeController": "controller"}
_PROC, _SHM = Path("/proc"), Path("/dev/shm")  # noqa: S108  # looked at, never written to
_OTHERS_FILES = ("plasma", "torch_", "sem.", "__KMP")
"""Files of Ray, torch and OpenMP in /dev/shm, which other programs have there too; plait has none with a name."""

_GONE_S, _POLL_S, _CPUS = 5.0, 0.25, 16
_DESCRIPTORS = 1 << 16
_PERIOD_S, _PATIENCE_S, _STILL, _STILL_SHARE = 2.0, 60.0, 3, 0.01
_CONNECT_S, _PREPARED_S = 10.0, 90.0
_KEPT_S = 2.0
"""How long an idle connection is used again: shorter than any server keeps it, so that none closes under a request."""


@dataclass(kw_only=True)
class FaultServer:
    """A server of ours, by the mark in its processes' environment and the process that started them."""

    url: str
    mark: str
    root: int
    folder: Path

    def titles(self) -> dict[int, str]:
        """Return the titles of its processes by their ids."""
        pids = (with_descendants([self.root]) | self._marked()) - {os.getpid()}
        return {pid: title for pid in sorted(pids) if (title := _title(pid))}

    def processes(self) -> dict[int, str]:
        """Return the kinds of its processes by their ids."""
        return {pid: "command" if pid == self.root else kind_of(title) for pid, title in self.titles().items()}

    def of(self, kind: str) -> list[int]:
        """Return its processes of a kind."""
        return [pid for pid, found in self.processes().items() if found == kind]

    def replicas(self) -> set[int]:
        """Return its processes but the command and Ray's: those that may be killed while it goes on."""
        return {pid for pid, kind in self.processes().items() if kind not in OTHERS | {"gcs"}}

    def usage(self) -> Usage:
        """Return what is held now: by the names in `HELD`, and the memory of each kind of process."""
        kinds, below = self.processes(), with_descendants([self.root])
        held = {pid: status_of(pid) for pid in kinds}
        memory: Usage = Counter()
        for pid, kind in kinds.items():
            memory[kind] += held[pid].get("RssAnon", 0) + held[pid].get("RssShmem", 0)
        files = [target for pid in kinds for target in _descriptors(pid)]
        counts = {
            "processes": len(kinds),
            "memory_bytes": memory.total(),
            "shared_bytes": sum(each.get("RssShmem", 0) for each in held.values()),
            "threads": sum(each.get("Threads", 0) for each in held.values()),
            "descriptors": len(files),
            "sockets": sum(target.startswith("socket:") for target in files),
            "socket_files": sum(path.is_socket() for path in self.folder.rglob("*")),
            "shm_files": sum(not entry.name.startswith(_OTHERS_FILES) for entry in _SHM.iterdir()),
            "zombies": sum(bool(status := status_of(pid)) and "VmRSS" not in status for pid in below),
            "orphans": len(kinds.keys() - below),
        }
        return memory + Counter(counts)

    def own_memory(self) -> Counter[str]:
        """Return what the processes of each kind hold, in bytes: their proportional sets without pages of files."""
        held: Counter[str] = Counter()
        for pid, kind in self.processes().items():
            sizes = status_of(pid, file="smaps_rollup")
            held[kind] += sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
        return held

    def peak_memory(self, kind: str) -> int:
        """Return the most that one process of this kind had in memory since it began, in bytes, pages of files too."""
        return max((status_of(pid).get("VmHWM", 0) for pid, its in self.processes().items() if its == kind), default=0)

    def _marked(self) -> set[int]:
        seen = psutil.process_iter(["environ"])
        return {each.pid for each in seen if (each.info["environ"] or {}).get(_MARK) == self.mark}


def kind_of(title: str) -> str:
    """Return the kind of a process of the server by its title, which Ray sets."""
    if title.startswith(_REPLICA):
        return title.removeprefix(_REPLICA).partition(".")[0].partition(" ")[0]
    if title.endswith("/gcs_server"):
        return "gcs"
    return next((kind for start, kind in _TITLES.items() if title.startswith(start)), "ray")


def _title(pid: int) -> str:
    """Return the title; none of a process that has ended."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""


def _descriptors(pid: int) -> list[str]:
    found = []
    with suppress(OSError):
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.append(str(entry.readlink()))
    return found


@contextmanager
def served(config: Mapping[str, Any], folder: Path, missed: list[str]) -> Iterator[FaultServer]:
    """Run `plait serve` with a folder for everything that it writes; what was not as after an orderly stop is added to
    `missed`.

    A thousand connections need as many descriptors, here and in the server, which inherits the limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS), hard)
    )
    (folder / "plait.yaml").write_text(json.dumps({"server": {"port": 0}, **config}))  # JSON is YAML
    mark = secrets.token_hex(8)
    with serving_plait(folder / "plait.yaml", environ={"TMPDIR": str(folder), _MARK: mark}) as (process, url):
        server = FaultServer(url=url, mark=mark, root=process.pid, folder=folder)
        yield server
        titles = server.titles()
    missed += [f"plait serve ended with {process.returncode}"] if process.returncode else []
    missed += _left_behind(titles, folder)


@contextmanager
def deployed(folder: Path, missed: list[str]) -> Iterator[tuple[FaultServer, Callable[[Any], Callable[[], bool]]]]:
    """Run a Ray of one node with Serve, as an operator does; yield with it what hands an application to Serve, and
    returns whether that runs. What is left behind is added to `missed`."""
    from plait_bench.placement.cluster import NodeSize, attached, deploy, local_nodes
    from plait_serving.deployments.proxy import proxy_environment

    mark, before = secrets.token_hex(8), dict(os.environ)
    os.environ.update(
        {_MARK: mark, "TMPDIR": str(folder), "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1", **proxy_environment(())}
    )
    try:
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        with redirect_stdout(sys.stderr), local_nodes() as nodes:  # where Ray tells who died
            nodes.add("one", NodeSize(cpus=_CPUS))
            with attached(nodes, port=port) as serve:

                def handed(application: Any) -> Callable[[], bool]:
                    deploy(serve, application)
                    return lambda: bool(serve.status().applications[application["name"]].status == "RUNNING")

                server = FaultServer(url=f"http://127.0.0.1:{port}", mark=mark, root=os.getpid(), folder=folder)
                yield server, handed
                titles = server.titles()
    finally:
        os.environ.clear()
        os.environ.update(before)
    missed += _left_behind(titles, folder)


def _left_behind(titles: Mapping[int, str], folder: Path) -> list[str]:
    """Return what has not gone: of processes, by their titles, and of sockets."""
    until_s = time.monotonic() + _GONE_S
    while (left := [pid for pid, title in titles.items() if _title(pid) == title]) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    sockets = [f"left behind: socket {path.relative_to(folder)}" for path in folder.rglob("*") if path.is_socket()]
    return [f"left behind: {titles[pid]} ({pid})" for pid in left] + sockets


class OnServer(Workload):
    """A workload whose systems are states of one server, which `configuration` describes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.missed: list[str] = []

    def configuration(self, folder: Path) -> Mapping[str, Any]:
        """Return the plait.yaml, whose files may be written into a folder. The default: the starter models."""
        return {}

    async def begin(self) -> None:
        """Prepare what all rounds share."""

    @abstractmethod
    async def measured(self, system: str, number: int) -> Sequence[Reading]:
        """Measure a round."""

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Run the server. Raises `SystemFailed`."""
        self.say = say
        # The path is short, because unix sockets are below it.
        with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp", ignore_cleanup_errors=True) as name:
            self.folder = Path(name)
            with self.started(self.configuration(self.folder)) as self.server:
                say(f"{self.server.url}: {dict(Counter(self.server.processes().values()))}")
                asyncio.run(self.begin())
                yield

    def started(self, config: Mapping[str, Any]) -> Any:
        """Start the server: a context manager."""
        return served(config, self.folder, self.missed)

    def promises(self, values: Values) -> Iterable[Promise]:
        """Return what may be so much at most."""
        return ()

    def judge(self, rows: Sequence[ResultRow]) -> list[str]:
        """Return what was seen meanwhile, and which promises are not kept."""
        promises = self.promises({(row.system, row.metric): row for row in rows})
        more = [f"{what}: {value:.2f}, more than {most:g}" for what, value, most in promises if value > most]
        return [*dict.fromkeys(self.missed), *more]

    def loaded(
        self, asks: Iterable[Ask], arrivals: Arrivals, seconds: float, *, key: str = "", within_s: float = 60.0
    ) -> FinishedRun:
        """Have the load tester ask for all of these; an answer is good if it comes `within_s`."""
        mix = [
            RawClass(name=ask.key, weight=WEIGHTS[ask.form], method="POST", path=ask.path, body=ask.body.decode())
            for ask in asks
        ]
        target = LoadTarget(url=self.server.url, api="raw", headers={"authorization": f"Bearer {key}"} if key else {})
        slo = Slo(latency_ms=1e3 * within_s)
        return run_scenario(Scenario(target=target, mix=tuple(mix), arrivals=arrivals, duration_s=seconds, slo=slo))

    def capacity_per_s(self, asks: Iterable[Ask], *, seconds: float, clients: int, key: str = "") -> float:
        """Measure how many requests are answered per second where `clients` ask without a pause."""
        return self.loaded(asks, ClosedLoopCallers(concurrency=clients), seconds, key=key).summary.total.achieved_per_s

    def take(self, system: str, number: int) -> Sequence[Reading]:
        """Measure a state of the server."""
        return asyncio.run(self.measured(system, number))


# ---- what it holds --------------------------------------------------------------------------------------------------

MEMORY_SHARE = 0.05
"""By how much memory may have grown: fresh processes are not laid out like old ones."""

_SLACK = {"threads": 16, "descriptors": 32, "sockets": 32, "shared_bytes": 32 << 20, "processes": 2}
"""What comes and goes by itself: pools of threads and connections, Ray's idle workers."""


HELD = (
    "processes", "memory_bytes", "shared_bytes", "threads", "descriptors", "sockets", "socket_files", "shm_files",
    "zombies", "orphans",
)  # fmt: skip
"""`socket_files`: in its folder; `orphans`: processes of the run that are no descendants of the one that started it."""


def grown(before: Usage, after: Usage) -> list[str]:
    """Return what is more afterwards than it may be, in words; of memory also whose, the most first."""
    found = []
    for name in HELD:
        was, now = before[name], after[name]
        share = MEMORY_SHARE if name in ("memory_bytes", "threads", "descriptors", "sockets") else 0.0
        if now > was + max(share * was, _SLACK.get(name, 0)):
            more = (after - before).most_common() if name == "memory_bytes" else []
            whose = "".join(f", {kind} by {held}" for kind, held in more if kind not in HELD)
            found.append(f"{name} grew from {was} to {now}{whose}")
    return found


async def settled(server: FaultServer) -> Usage:
    """Wait until memory and the number of processes stand still, or the patience is over; return what is held then."""
    until_s = time.monotonic() + _PATIENCE_S
    now, still = await asyncio.to_thread(server.usage), 0
    while still < _STILL and time.monotonic() < until_s:
        await asyncio.sleep(_PERIOD_S)
        before, now = now, await asyncio.to_thread(server.usage)
        moved = abs(now["memory_bytes"] - before["memory_bytes"]) / max(1, before["memory_bytes"])
        still = still + 1 if moved < _STILL_SHARE and now["processes"] == before["processes"] else 0
    return now


@asynccontextmanager
async def watched(look: Callable[[], T], *, every_s: float) -> AsyncIterator[list[tuple[float, T]]]:
    """Look at something every now and then; yield what was seen, each with its time."""
    seen: list[tuple[float, T]] = []

    async def watch() -> None:
        while True:
            seen.append((time.monotonic(), await asyncio.to_thread(look)))
            await asyncio.sleep(every_s)

    async with cancelled([asyncio.create_task(watch())]):
        yield seen


# ---- requests to it -------------------------------------------------------------------------------------------------


class Client:
    """Sends requests to one server. One that has not ended after `hung_s` counts as hung."""

    def __init__(self, url: str, *, hung_s: float = 180.0, key: str = "") -> None:
        self._hung_s = hung_s
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})},
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEPT_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, ask: Ask, *, leave_after_s: float | None = None) -> Reply:
        """Send a request and wait for its end; with `leave_after_s` disconnect then, if it has not ended."""
        began_s, facts, pieces = time.monotonic(), dict[str, Any](), list[bytes]()
        try:
            async with (
                asyncio.timeout(self._hung_s if leave_after_s is None else leave_after_s),
                self._http.stream("POST", ask.path, content=ask.body) as response,
            ):
                facts |= {"status": response.status_code, "headers": dict(response.headers)}
                async for piece in response.aiter_bytes():
                    pieces.append(piece)  # what came before a break is kept
        except TimeoutError:
            facts |= {"is_hung": leave_after_s is None, "has_left": leave_after_s is not None}
        except httpx2.TransportError as error:
            facts["failure"] = f"{type(error).__name__}: {error}"
        return Reply(began_s=began_s, ended_s=time.monotonic(), body=b"".join(pieces), **facts)

    async def get(self, path: str, *, timeout_s: float = 30.0) -> httpx2.Response:
        """GET. Raises `httpx2.TransportError`."""
        return await self._http.get(path, timeout=timeout_s)

    async def images(self, asks: Sequence[Ask], *, at_once: int) -> list[Reply]:
        """Send requests that must have right answers. Raises `SystemFailed`."""
        replies = [reply for _, reply in await send_all(self, asks, at_once=at_once)]
        for ask, reply in zip(asks, replies, strict=True):
            if (verdict := verdict_of(ask, reply, None)).end is not End.RIGHT:
                raise SystemFailed(f"{ask.key} has no answer on a quiet server: {verdict.end} {verdict.what}")
        return replies

    async def prepared(self) -> None:
        """Wait until the engine runs on what it converts behind its first requests, or the patience is over."""
        until_s = time.monotonic() + _PREPARED_S
        while time.monotonic() < until_s:
            parts = prepared_parts((await self.get("/metrics")).text)
            if parts is None or parts >= {"unet", "vae"}:
                return
            await asyncio.sleep(0.5)


async def send_all(client: Client, asks: Sequence[Ask], *, at_once: int) -> list[tuple[Ask, Reply]]:
    """Send each request once, so many at a time; return the replies in the order of the requests."""
    room = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> tuple[Ask, Reply]:
        async with room:
            return ask, await client.send(ask)

    return await asyncio.gather(*(one(ask) for ask in asks))


async def offered(send: Callable[[int], Awaitable[T]], per_s: float, seconds: float) -> list[tuple[T, float]]:
    """Call `send` with 0, 1, ... at an even rate, whatever becomes of it; return what came of each call, with the
    seconds from when it was due until its end."""
    began_s = time.monotonic()

    async def one(number: int) -> tuple[T, float]:
        due_s = began_s + number / per_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        result = await send(number)
        return result, time.monotonic() - due_s

    return await asyncio.gather(*(one(number) for number in range(max(1, round(per_s * seconds)))))


@asynccontextmanager
async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """Have these tasks disconnect at the end."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
