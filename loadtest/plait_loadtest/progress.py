"""The live line on stderr while a load runs; silent when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from plait_loadtest.report.table import number


class Told(Protocol):
    """What the runner says a few times a second (`run.coordinator.Progress`)."""

    @property
    def elapsed_s(self) -> float:
        """Negative while requests are being prepared."""

    @property
    def planned(self) -> int | None:
        """Requests of the plan; None in a closed loop."""

    @property
    def done(self) -> int:
        """Requests that ended."""

    @property
    def errors(self) -> int:
        """How many of them failed."""

    @property
    def in_flight(self) -> int:
        """Requests under way."""

    @property
    def waiting(self) -> int:
        """Requests that are due and have no connection yet."""

    @property
    def recent_p50_ms(self) -> float | None:
        """Of what ended since the last word."""

    @property
    def recent_p95_ms(self) -> float | None:
        """The same."""


Show = Callable[[Told], None]


@contextmanager
def live_line(total_s: float | None) -> Iterator[Show]:
    """Gives the function that shows progress for as long as the block runs. ``total_s``: of the whole run, if known."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(Text("preparing"), console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda told: live.update(Text(line(told, total_s), no_wrap=True, overflow="ellipsis"), refresh=True)


def line(told: Told, total_s: float | None) -> str:
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
