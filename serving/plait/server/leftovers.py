"""Leftovers of killed runs: processes, Ray's files, records. Only what belongs to plait is touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from plait.errors import ServeError, StateError
from plait.server import processes
from plait.server.state import PortState, RunRecord, read_record, scratch_root

_WATCH = 'read -r _; exec "$@"'
"""Nothing is ever written. A shell waits, which takes less memory than Python."""


def clean_up(state: PortState) -> tuple[processes.ProcessId, ...]:
    """End whatever an earlier, killed run on this port left behind. Return the processes that were ended."""
    record = state.previous
    if record is None:
        return ()
    ended = () if record.ray_folder is None else _end_run(record, record.ray_folder)
    state.forget()
    return ended


def _end_run(record: RunRecord, ray_folder: str) -> tuple[processes.ProcessId, ...]:
    """End the processes of a run and remove its files. Return the processes. Raises `ServeError`."""
    left = set(processes.members(record.run_id))
    if record.boot_id == processes.boot_id():
        left |= {process for process in record.processes if processes.is_running(process)}
    left = {process for process in left if process.pid != os.getpid()}  # which may be of it: `end_with_us`
    if survivors := processes.end(left):
        raise ServeError(f"could not end process {survivors[0].pid} that an earlier run left behind")
    remove_ray_folder(Path(ray_folder), logs_to=None)
    remove_sockets()
    return tuple(left)


def end_with_us(record: Path) -> subprocess.Popen[bytes]:
    """Have the run of a run.json ended when this process dies, kill -9 included. Ray's agents would outlive it: they
    tell its control store, which is gone, of the raylet's death before they end."""
    end = f"from plait.server.leftovers import end_recorded; end_recorded({str(record)!r}, {os.getpid()})"
    command = ["/bin/sh", "-c", _WATCH, "sh", sys.executable, "-P", "-c", end]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # not for a terminal's Ctrl-C


def end_recorded(path: str, command: int) -> None:
    """End the run of this run.json, unless the next start has, and may have written its own."""
    record = read_record(Path(path).parent)
    if record is not None and record.ray_folder is not None and record.command.pid == command:
        _end_run(record, record.ray_folder)


def clean_up_others(root: Path) -> None:
    """Do the same for dead runs on other ports; live runs hold their lock and are left alone."""
    for record in root.glob("port-*/run.json"):
        with contextlib.suppress(StateError, ServeError, ValueError):
            other = PortState.claim(root, int(record.parent.name.removeprefix("port-")))
            try:
                clean_up(other)
            finally:
                other.release()


def remove_sockets() -> None:
    """Remove the sockets of replicas that are gone: Ray kills its actors, which can then remove nothing themselves."""
    from plait_serving.cores import remove_stale_sockets, socket_folder

    with contextlib.suppress(OSError):
        remove_stale_sockets(socket_folder())


def remove_ray_folder(folder: Path, *, logs_to: Path | None) -> None:
    """Remove Ray's temporary folder, but only one of ours; its logs may be kept."""
    if folder.parent != scratch_root() or not folder.name.startswith("r-") or folder.is_symlink():
        return
    if logs_to is not None:
        shutil.rmtree(logs_to, ignore_errors=True)
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(next(folder.glob("session_2*/logs"), folder), logs_to)
    for _ in range(10):  # Ray's own threads in this process may still write a last line
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
