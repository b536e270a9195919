"""The live line on stderr while a load runs; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from plait_loadtest.report.table import number
from plait_loadtest.values import OnProgress, RunProgress


@contextmanager
def live_line(total_s: float | None) -> Iterator[OnProgress]:
    """Gives the function that shows progress for as long as the block runs. ``total_s``: of the whole run, if known."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text("preparing"), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda told: live.update(Text(line(told, total_s), no_wrap=True, overflow="ellipsis"), refresh=True)


def line(told: RunProgress, total_s: float | None) -> str:
    """One line: time, requests, errors, what is under way, recent latency."""
    if told.elapsed_s < 0:
        return "preparing requests"
    of_s = "" if total_s is None else f" of {total_s:.0f}"
    of_n = "" if told.planned is None else f" of {told.planned:,}"
    parts = [f"{told.elapsed_s:.0f}{of_s} s", f"{told.done:,}{of_n} done"]
    if told.errors:
        parts.append(f"{told.errors:,} failed")
    parts.append(f"{told.in_flight:,} in flight" + (f", {told.waiting:,} waiting" if told.waiting else ""))
    if told.recent_p50_ms is not None:
        parts.append(f"now p50 {number(told.recent_p50_ms)} ms, p95 {number(told.recent_p95_ms)} ms")
    return " · ".join(parts)
