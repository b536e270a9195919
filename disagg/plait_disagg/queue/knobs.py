"""What may change on a running worker. Plain data, checked by its pydantic counterpart in the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

WireFormat = Literal["float32", "float16", "int8"]
"""How float32 tensors cross from the CN to the HN. int8: with one scale and one bias per row."""

WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)

CachePolicy = Literal["lru", "static"]
"""Which rows an HN keeps: the most recently used ones, or permanently the ones that were requested first."""

Order = Literal["deadline", "arrival"]
"""By what the next of the waiting requests is chosen."""


@dataclass(frozen=True, kw_only=True)
class WorkerKnobs:
    """Settings of a worker that may change while it runs.

    `threads`: CPU threads of the compute thread; 0: all cores. `cores`: those that it and its team are bound to;
    none: the system chooses. `largest_batch_rows`: candidates of one batch; a larger request runs alone.
    `largest_waiting`: requests that wait for a batch; more are rejected with `Busy`.

    `order`: most urgent first, or first come, first served. `refuse_late`: a request whose deadline cannot be met is
    rejected, or given up, before it costs anything. A batch that is not full waits `batch_wait_ms` for more.

    For a CN only: at most `window` batches are at an HN at once, fewer where they would queue there if
    `adapt_window`, and `wire` is the format of their floats. Each HN keeps `cache_rows` rows of every table whose
    rows cross unchanged (0: none), chosen by `cache`; a change of these two or of `wire` empties the caches.
    """

    threads: int = 1
    cores: tuple[int, ...] = ()
    largest_batch_rows: int = 4_096
    largest_waiting: int = 1_024
    order: Order = "deadline"
    refuse_late: bool = True
    batch_wait_ms: float = 0.0
    window: int = 4
    adapt_window: bool = True
    wire: WireFormat = "float32"
    cache_rows: int = 0
    cache: CachePolicy = "lru"
