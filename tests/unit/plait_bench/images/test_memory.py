"""The memory of processes and their descendants."""

from __future__ import annotations

from plait_bench.images.fleet import peak_memory_of


def process(proc, pid, parent, peak_kb, shared_kb=0):
    """One process as /proc shows it; `shared_kb`: what others account for of the pages that it has now."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\nVmHWM:\t{peak_kb:>8} kB\nVmRSS:\t{7:>8} kB\n")
    (folder / "smaps_rollup").write_text(
        f"00400000-7ffe ---p 00000000 00:00 0 [rollup]\nRss:\t{7:>8} kB\nPss:\t{7 - shared_kb:>8} kB\nPss_Anon:\t1 kB\n"
    )


def test_descendants_count_and_others_do_not(tmp_path):
    """A server's replicas are grandchildren; a neighbour is nobody's."""
    process(tmp_path, 10, 1, 150)
    process(tmp_path, 11, 10, 30)
    process(tmp_path, 12, 11, 4)
    process(tmp_path, 13, 1, 1000)
    (tmp_path / "self").mkdir()
    assert peak_memory_of([10], tmp_path) == peak_memory_of([10, 11], tmp_path) == 184 * 1024
    assert peak_memory_of([99], tmp_path) == 0


def test_what_processes_share_counts_once(tmp_path):
    """Ray's processes have its library and Python's in common."""
    process(tmp_path, 10, 1, 150, shared_kb=3)
    process(tmp_path, 11, 10, 30, shared_kb=3)
    assert peak_memory_of([10], tmp_path) == 174 * 1024
