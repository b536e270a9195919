"""The live line on stderr while a load runs; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from plait_loadtest.values import OnProgress, RunProgress
from plait_report.page import number


@contextmanager
def live_line(total_s: float | None) -> Iterator[OnProgress]:
    """Yield the function that shows progress while the block runs. `total_s`: of the whole run, if known."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text("preparing"), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(
            Text(line(progress, total_s), no_wrap=True, overflow="ellipsis"), refresh=True
        )


def line(progress: RunProgress, total_s: float | None) -> str:
    """Return one line: time, requests, errors, requests in flight, recent latency."""
    if progress.elapsed_s < 0:
        return "preparing requests"
    of_s = "" if total_s is None else f" of {total_s:.0f}"
    of_n = "" if progress.planned is None else f" of {progress.planned:,}"
    parts = [f"{progress.elapsed_s:.0f}{of_s} s", f"{progress.done:,}{of_n} done"]
    if progress.errors:
        parts.append(f"{progress.errors:,} failed")
    parts.append(f"{progress.in_flight:,} in flight" + (f", {progress.waiting:,} waiting" if progress.waiting else ""))
    if progress.recent_p50_ms is not None:
        parts.append(f"now p50 {number(progress.recent_p50_ms)} ms, p95 {number(progress.recent_p95_ms)} ms")
    return " · ".join(parts)
