"""What may change on a running worker. Plain data; the pydantic twin of a configuration file is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CachePolicy", "WireFormat", "WorkerKnobs"]

WireFormat = Literal["float32", "float16", "int8"]
"""How float32 tensors cross from the CN to the HN. int8: one scale and one bias per row."""

CachePolicy = Literal["lru", "static"]
"""Which rows an HN keeps: those used last, or for good the ones that were asked for first."""


@dataclass(frozen=True, kw_only=True)
class WorkerKnobs:
    """``threads``: CPU threads of the compute thread; 0: all cores. ``largest_batch_rows``: candidates of one batch; a
    larger request runs alone. ``largest_waiting``: requests that wait for a batch; more are refused as `Busy`.

    Of a CN only: ``window`` batches are at an HN at once, and ``wire`` is how their floats travel. Each HN keeps
    ``cache_rows`` rows of every table whose rows cross as they are (0: none), chosen by ``cache``; a change of these
    two or of ``wire`` empties the caches.
    """

    threads: int = 1
    largest_batch_rows: int = 4_096
    largest_waiting: int = 1_024
    window: int = 4
    wire: WireFormat = "float32"
    cache_rows: int = 0
    cache: CachePolicy = "lru"

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, got {self.threads}")
        if self.cache_rows < 0:
            raise ValueError(f"cache_rows must not be negative, got {self.cache_rows}")
        if self.cache not in ("lru", "static"):
            raise ValueError(f"cache must be lru or static, got {self.cache!r}")
        for name in ("largest_batch_rows", "largest_waiting", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.wire not in ("float32", "float16", "int8"):
            raise ValueError(f"wire must be float32, float16 or int8, got {self.wire!r}")
