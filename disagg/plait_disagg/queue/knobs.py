"""What may change on a running worker, as its section of the configuration says it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

WireFormat = Literal["float32", "float16", "int8"]
"""How float32 tensors cross from the CN to the HN. int8: with one scale and one bias per row."""

WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)

CachePolicy = Literal["lru", "static"]
"""Which rows an HN keeps: the most recently used ones, or permanently the ones that were requested first."""

Order = Literal["deadline", "arrival"]
"""By what the next of the waiting requests is chosen."""


class HnKnobs(BaseModel):
    """Settings of an HN or a whole worker that may change while it runs.

    `threads`: CPU threads of the compute thread; 0: all cores. `cores`: those that it and its team are bound to;
    none: the system chooses. `largest_batch_rows`: candidates of one batch; a larger request runs alone.
    `largest_waiting`: requests that wait for a batch; more are rejected with `Busy`.

    `order`: most urgent first, or first come, first served. `refuse_late`: a request whose deadline cannot be met is
    rejected, or given up, before it costs anything. A batch that is not full waits `batch_wait_ms` for more.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: Annotated[int, Field(ge=0, le=1024, description="CPU threads of a batch; 0: all cores")] = 1
    cores: Annotated[
        tuple[Annotated[int, Field(ge=0, le=4095)], ...], Field(description="which cores they are bound to; none: any")
    ] = ()
    largest_batch_rows: Annotated[int, Field(ge=1, le=1_000_000, description="candidates of one batch")] = 4_096
    largest_waiting: Annotated[int, Field(ge=1, le=1_000_000, description="requests that wait; then 429")] = 1_024
    order: Annotated[Order, Field(description="who is next: the most urgent (deadline) or the first (arrival)")] = (
        "deadline"
    )
    refuse_late: Annotated[bool, Field(description="refuse at once what cannot be answered by its deadline")] = True
    batch_wait_ms: Annotated[float, Field(ge=0, le=1000, description="how long a batch waits for more requests")] = 0.0


class WorkerKnobs(HnKnobs):
    """Those of a CN, which are all that a worker may have.

    At most `window` batches are at an HN at once, fewer where they would queue there if `adapt_window`, and `wire` is
    the format of their floats. Each HN keeps `cache_rows` rows of every table whose rows cross unchanged (0: none),
    chosen by `cache`; a change of these two or of `wire` empties the caches.
    """

    window: Annotated[int, Field(ge=1, le=64, description="batches at an HN at once, at most")] = 4
    adapt_window: Annotated[bool, Field(description="fewer while batches wait at the HN")] = True
    wire: Annotated[WireFormat, Field(description="how floats travel to the HN")] = "float32"
    cache_rows: Annotated[int, Field(ge=0, le=100_000_000, description="rows of a table that each HN keeps")] = 0
    cache: Annotated[CachePolicy, Field(description="which rows: used last (lru) or asked for first")] = "lru"
