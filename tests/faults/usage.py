"""What a server holds: memory, threads, descriptors, sockets, shared memory, and processes that nobody waits for.

All from /proc. Memory is what processes hold in pages that are no file's (shared ones count for each), by kind of
process: pages of libraries and of weights that are mapped come and go as the kernel likes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults.server import RunningServer
from faults.tenants import cancelled

__all__ = ["Usage", "grown", "own_memory", "peaks", "settled", "usage_of"]

_PROC = Path("/proc")
_SHM = Path("/dev/shm")  # looked at, never written to
_OTHERS_FILES = ("plasma", "torch_", "sem.", "__KMP")
"""Files of Ray, torch and OpenMP in /dev/shm, which other programs have there too; plait has none with a name."""

_PERIOD_S, _PATIENCE_S = 2.0, 60.0
_STILL = 3
_STILL_SHARE = 0.01

MEMORY_SHARE = 0.05
"""By how much memory may have grown: fresh processes are not laid out like old ones."""

_SLACK = {"threads": 16, "descriptors": 32, "shared_bytes": 32 << 20, "processes": 2}
"""What comes and goes by itself: pools of threads and connections, Ray's idle workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a server holds at one moment. `socket_files`: in its folders; `orphans`: processes of the run that are no
    descendants of the command."""

    processes: int
    memory_bytes: int
    shared_bytes: int
    threads: int
    descriptors: int
    sockets: int
    socket_files: int
    shm_files: int
    zombies: int
    orphans: int
    memory_by_kind: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "memory_by_kind": dict(self.memory_by_kind)}


def usage_of(server: RunningServer) -> Usage:
    """Look at the server's processes and folders now."""
    kinds = {process.pid: kind for process, kind in server.processes().items()}
    memory: Counter[str] = Counter()
    shared = threads = descriptors = sockets = 0
    for pid, kind in kinds.items():
        status = _status(pid)
        memory[kind] += (status.get("RssAnon", 0) + status.get("RssShmem", 0)) << 10
        shared += status.get("RssShmem", 0) << 10
        threads += status.get("Threads", 0)
        targets = _descriptors(pid)
        descriptors += len(targets)
        sockets += sum(target.startswith("socket:") for target in targets)
    parents, dead = _parents()
    return Usage(
        processes=len(kinds),
        memory_bytes=memory.total(),
        shared_bytes=shared,
        threads=threads,
        descriptors=descriptors,
        sockets=sockets,
        socket_files=sum(path.is_socket() for folder in server.folders for path in folder.rglob("*")),
        shm_files=sum(not entry.name.startswith(_OTHERS_FILES) for entry in _SHM.iterdir()) if _SHM.is_dir() else 0,
        zombies=sum(parents.get(pid) in kinds for pid in dead),
        orphans=sum(not _is_below(pid, server.command, parents) for pid in kinds),
        memory_by_kind=dict(sorted(memory.items())),
    )


async def settled(server: RunningServer, *, patience_s: float = _PATIENCE_S) -> Usage:
    """Wait until memory and the number of processes stand still, at most `patience_s`; return what is held then."""
    until_s = time.monotonic() + patience_s
    now = await asyncio.to_thread(usage_of, server)
    still = 0
    while still < _STILL and time.monotonic() < until_s:
        await asyncio.sleep(_PERIOD_S)
        before, now = now, await asyncio.to_thread(usage_of, server)
        moved = abs(now.memory_bytes - before.memory_bytes) / max(1, before.memory_bytes)
        still = still + 1 if moved < _STILL_SHARE and now.processes == before.processes else 0
    return now


def grown(before: Usage, after: Usage) -> dict[str, tuple[int, int]]:
    """Return what is more afterwards than it may be: before and after, by name."""
    found = {}
    for name, was in asdict(before).items():
        if isinstance(was, int):
            share = MEMORY_SHARE if name in ("memory_bytes", "threads", "descriptors", "sockets") else 0.0
            slack = _SLACK["descriptors"] if name == "sockets" else _SLACK.get(name, 0)
            now = getattr(after, name)
            if now > was + max(share * was, slack):
                found[name] = (was, now)
    return found


def own_memory(server: RunningServer) -> dict[str, int]:
    """Return what the processes of each kind hold, in bytes: their proportional sets without pages of files."""
    held: Counter[str] = Counter()
    for process, kind in server.processes().items():
        sizes = _status(process.pid, "smaps_rollup")
        held[kind] += (sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)) << 10
    return dict(held)


@asynccontextmanager
async def peaks(server: RunningServer, *, every_s: float) -> AsyncIterator[Counter[str]]:
    """Look at `own_memory` every now and then; yield the most that each kind of process had meanwhile."""
    found: Counter[str] = Counter()

    async def watch() -> None:
        while True:
            for kind, held in (await asyncio.to_thread(own_memory, server)).items():
                found[kind] = max(found[kind], held)
            await asyncio.sleep(every_s)

    async with cancelled([asyncio.create_task(watch())]):
        yield found


def _status(pid: int, file: str = "status") -> dict[str, int]:
    """Return the numbers of a process's status file; none if it has ended."""
    try:
        lines = (_PROC / str(pid) / file).read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}


def _descriptors(pid: int) -> list[str]:
    found = []
    try:
        for entry in os.scandir(_PROC / str(pid) / "fd"):
            try:
                found.append(str(Path(entry.path).readlink()))
            except OSError:
                continue
    except OSError:
        return []
    return found


def _parents() -> tuple[dict[int, int], list[int]]:
    """Return every process's parent, and those that are dead and not yet waited for."""
    parents: dict[int, int] = {}
    dead = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            if fields[0] == "Z":
                dead.append(int(entry.name))
    return parents, dead


def _is_below(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    seen: set[int] = set()
    while pid and pid not in seen:
        if pid == root:
            return True
        seen.add(pid)
        pid = parents.get(pid, 0)
    return False


def described(usages: Iterable[tuple[str, Usage]]) -> list[str]:
    """Return lines for people: a table of what was held when."""
    rows = [(name, usage) for name, usage in usages]
    names = [name for name in asdict(rows[0][1]) if name != "memory_by_kind"]
    lines = [f"{'':<16}" + "".join(f"{name:>16}" for name, _ in rows)]
    for name in names:
        values = [getattr(usage, name) for _, usage in rows]
        shown = [f"{value / 2**20:,.0f} MiB" if name.endswith("_bytes") else f"{value:,}" for value in values]
        lines.append(f"{name.removesuffix('_bytes'):<16}" + "".join(f"{text:>16}" for text in shown))
    return lines
