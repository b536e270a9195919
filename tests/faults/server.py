"""The server that a run asks: started for it, or found running; and its processes by kind.

Kinds are the names of the deployments (`engine`, `cn-picks`, ...), `proxy` and `controller` (Serve's own processes),
`gcs` (Ray's control store), `command` (`plait serve` itself) and `ray` (everything else).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from plait.server import processes
from plait.server.processes import ProcessId
from plait.server.state import RunRecord, scratch_root, state_root
from support.server import REAL, PlaitServer, free_port

__all__ = ["NEVER_KILLED", "OTHERS", "RunningServer", "attached", "kind_of", "send", "started"]

OTHERS = frozenset({"command", "ray"})
"""Kinds that no run touches: with `plait serve` or Ray itself the server ends, as it says."""

NEVER_KILLED = frozenset({"gcs"})
"""Kinds that a run only stops for a while: with them Ray ends."""

_REPLICA = "ray::ServeReplica:plait:"
_TITLES = {"ray::ProxyActor": "proxy", "ray::ServeController": "controller"}
_STOP_S = 90.0
_GONE_S = 5.0


@dataclass(kw_only=True)
class RunningServer:
    """A server and where its files are. `left`: what it left behind, once it was stopped."""

    url: str
    run_id: str
    command: int
    folders: tuple[Path, ...]
    left: list[str] = field(default_factory=list)

    def processes(self) -> dict[ProcessId, str]:
        """Return its processes with their kinds."""
        members = processes.members(self.run_id, self.command)
        found = {process: kind_of(_title(process.pid)) for process in members}
        if (command := processes.identify(self.command)) is not None:
            found[command] = "command"
        return found

    def of(self, kind: str) -> list[ProcessId]:
        """Return its processes of a kind."""
        return [process for process, found in self.processes().items() if found == kind]

    def replicas(self) -> frozenset[ProcessId]:
        """Return its processes but the command and Ray's: those that may be killed while it goes on."""
        return frozenset(process for process, kind in self.processes().items() if kind not in OTHERS | NEVER_KILLED)

    def kinds(self) -> Counter[str]:
        """Return how many processes there are of each kind."""
        return Counter(self.processes().values())


def kind_of(title: str) -> str:
    """Return the kind of a process of the server by its title, which Ray sets."""
    if title.startswith(_REPLICA):
        return title.removeprefix(_REPLICA).partition(".")[0].partition(" ")[0]
    if title.endswith("/gcs_server"):
        return "gcs"
    return next((kind for start, kind in _TITLES.items() if title.startswith(start)), "ray")


def send(process: ProcessId, signum: signal.Signals) -> bool:
    """Send a signal to exactly this process; return whether it was there."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not processes.is_running(process):
            return False
        signal.pidfd_send_signal(handle, signum)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


@contextmanager
def started(*settings: str, config: str | None = None) -> Iterator[RunningServer]:
    """Run `plait serve` with a folder of its own for everything that it writes; `settings` are `path=value`, `config`
    the text of a plait.yaml. The default is the starter models.

    The folder's path is short, because unix sockets are in it.
    """
    root = Path(tempfile.mkdtemp(prefix="pf-", dir="/tmp"))
    try:
        port = free_port()
        arguments = [*_file(root, config), "--port", str(port)]
        for setting in settings:
            arguments += ["--set", setting]
        server = PlaitServer.launch(REAL, arguments, port=port, root=root, environ={"TMPDIR": str(root)})
        running: RunningServer | None = None
        members: frozenset[ProcessId] = frozenset()
        try:
            server.wait_ready()
            running = RunningServer(
                url=server.url, run_id=server.record().run_id, command=server.process.pid, folders=(root,)
            )
            yield running
            members = server.members()
        finally:
            left = _stopped(server, members)
            if running is not None:
                running.left += [*left, *(f"socket {path.relative_to(root)}" for path in _sockets(root))]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _file(root: Path, config: str | None) -> Sequence[str]:
    if config is None:
        return ()
    path = root / "plait.yaml"
    path.write_text(config)
    return (str(path),)


def _stopped(server: PlaitServer, members: frozenset[ProcessId]) -> list[str]:
    """Stop the server; return what was not as after an orderly stop."""
    try:
        if server.process.poll() is None:
            server.signal(signal.SIGTERM)
        code = server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill_and_clean()
        return [f"plait serve did not stop within {_STOP_S:g} s"]
    left = [f"process {process.pid}" for process in processes.wait_until_gone(members, timeout_s=_GONE_S)]
    return left if code == 0 else [f"plait serve ended with {code}: {server.errors()[-400:]}", *left]


def _sockets(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_socket()]


@contextmanager
def attached(port: int) -> Iterator[RunningServer]:
    """Find the server that this user runs on a port, and leave it running. Raises `LookupError`."""
    path = state_root(os.environ) / f"port-{port}" / "run.json"
    try:
        record = RunRecord.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LookupError(f"no plait serve of this user runs on port {port}: {path} {error}") from error
    if not processes.is_running(record.command):
        raise LookupError(f"the plait serve on port {port} has ended")
    folders = [scratch_root(), *([Path(record.ray_folder)] if record.ray_folder else [])]
    yield RunningServer(
        url=f"http://127.0.0.1:{port}", run_id=record.run_id, command=record.command.pid, folders=tuple(folders)
    )


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""
