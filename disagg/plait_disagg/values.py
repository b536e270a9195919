"""The records of ranking: what a model offers, its requests and its answers. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from plait_disagg.graph.inputs import Input, tensor_names

if TYPE_CHECKING:
    import torch  # takes two seconds, and who only passes requests on needs none of it


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What a client must know about a model. `outputs`: name to shape of one row, all float32.

    `largest_candidates` bounds one request. `items`: how many items the package knows the features of by
    their ids (`/v1/recommend` then takes bare ids), or None. `version` changes with every refresh;
    `packaged` is the version that the model was packaged as ("" if it never changed).
    """

    name: str
    version: str
    inputs: tuple[Input, ...]
    outputs: Mapping[str, tuple[int, ...]]
    largest_candidates: int = 10_000
    items: int | None = None
    mode: str = "whole"
    id_rows: Mapping[str, int] = field(default_factory=dict)
    packaged: str = ""

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        """Names of a request's tensors."""
        return frozenset(tensor_names(self.inputs))


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """One user and N candidates, checked.

    `tensors` has exactly the names of `tensor_names`: user inputs have one row, item inputs N, float32 or int64,
    contiguous; a bag's offsets are (rows + 1,) and start at 0. `deadline_s` is the `time.monotonic()` after which
    nobody waits for the answer.
    """

    request_id: str
    model: str
    candidates: int
    tensors: Mapping[str, torch.Tensor]
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankTimings:
    """Where the time was spent, in milliseconds: waiting for a batch, lookups, the wire, the dense half."""

    queued_ms: float = 0.0
    lookup_ms: float = 0.0
    wire_ms: float = 0.0
    dense_ms: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from when the worker received the request."""
        return (self.queued_ms + self.lookup_ms + self.wire_ms + self.dense_ms) / 1e3


@dataclass(frozen=True, kw_only=True)
class RankAnswer:
    """The answer to a request.

    `outputs`: name to (N, ...) float32 on the CPU, in the order of the request's candidates. `version`: that of the
    model that computed all of them.
    """

    outputs: Mapping[str, torch.Tensor]
    timings: RankTimings = field(default_factory=RankTimings)
    bytes_crossed: int = 0
    version: str = ""
