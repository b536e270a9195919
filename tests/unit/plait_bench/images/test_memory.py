"""The memory of processes and their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from plait_bench.images import fleet
from plait_bench.images.fleet import peak_memory_of, with_descendants

PARENT = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(flush=True); sys.stdin.read()"


def process(proc, pid, peak_kb, shared_kb=0):
    """One process as /proc shows it; `shared_kb`: what others account for of the pages that it has now."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tpython\nVmHWM:\t{peak_kb:>8} kB\nVmRSS:\t{7:>8} kB\n")
    (folder / "smaps_rollup").write_text(
        f"00400000-7ffe ---p 00000000 00:00 0 [rollup]\nRss:\t{7:>8} kB\nPss:\t{7 - shared_kb:>8} kB\nPss_Anon:\t1 kB\n"
    )


def test_descendants_count_and_others_do_not():
    """A server's replicas are grandchildren; a neighbour is nobody's, and who has ended has none."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        both = with_descendants([parent.pid])
        (child,) = both - {parent.pid}
        assert both < with_descendants([os.getpid()])
        assert peak_memory_of([parent.pid]) > peak_memory_of([child]) > 0
        os.kill(child, signal.SIGKILL)
    assert with_descendants([parent.pid]) == {parent.pid}
    assert peak_memory_of([parent.pid]) == 0


def test_what_processes_share_counts_once(tmp_path, monkeypatch):
    """Ray's processes have its library and Python's in common."""
    monkeypatch.setattr(fleet, "_PROC", tmp_path)
    monkeypatch.setattr(fleet, "with_descendants", lambda pids: {*pids, 11})
    process(tmp_path, 10, 150, shared_kb=3)
    process(tmp_path, 11, 30, shared_kb=3)
    assert peak_memory_of([10]) == 174 * 1024
