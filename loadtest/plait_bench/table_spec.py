"""What a table of a README file shows: which rows, and which metrics side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["MEDIANS", "TableSpec"]

MEDIANS = (
    "Medians of rounds taken in turn; in parentheses the 20th and 80th percentile, or the lowest and highest median "
    "where there are several runs. Ratios are taken round by round."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A table's rows and columns.

    `metrics`: each a column by its title or, if `long`, a line of its own. `ratio`: the metric whose ratio is shown.
    `workloads`: only those with these prefixes; `endings`: and with one of these; `without`: and with none of these.
    `counted`: what a row's `n` counts, if not rounds. `digits`: how many figures of a number below 1,000 are shown.
    """

    bench: str
    metrics: Mapping[str, str]
    long: bool = False
    ratio: str = ""
    ratio_title: str = "ratio"
    workloads: tuple[str, ...] = ("",)
    endings: tuple[str, ...] = ("",)
    without: tuple[str, ...] = ()
    counted: str = "rounds"
    verb: str = "Measured"
    says: str = MEDIANS
    digits: int = 3

    @property
    def columns(self) -> tuple[str, ...]:
        """The titles of the value columns."""
        return ("value",) if self.long else tuple(self.metrics.values())

    def shows(self, row: Mapping[str, Any]) -> bool:
        """Return whether the table shows a record."""
        metrics = {self.ratio} if row["unit"] == "ratio" and self.ratio != "*" else self.metrics
        workload = row["workload"]
        is_mine = workload.startswith(self.workloads) and workload.endswith(self.endings)
        return row["metric"] in metrics and is_mine and not workload.endswith(self.without)
