"""What the parts of a program cost: the bytes of every value and the seconds of every operator, measured by running it.

The CN's seconds are always measured, on one thread. The HN's are measured if there is a device to measure on;
otherwise they are *modelled* from the CN's by `HnModel`, and every number that depends on them is marked as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from statistics import median
from types import MappingProxyType
from typing import Any

import torch

from plait_disagg.graph.cut import CutProblem
from plait_disagg.graph.edit import flat_values
from plait_disagg.graph.inputs import OFFSETS
from plait_disagg.graph.operators import SIZE, Kind, kind_of
from plait_disagg.graph.program import LOOKUP, ROWS, Node, Port, Program
from plait_disagg.graph.reference import run_reference
from plait_disagg.graph.small_tables import is_bound
from plait_disagg.tables.protocols import Tables
from plait_kernels.devices import synchronize

LINK_BYTES_PER_S = 12.4e9
"""The bandwidth of a 100 Gbit/s RDMA link in one direction (as perftest measures it; the simulator's link has the
same rate). Modelled."""

_SPEEDUP: Mapping[Kind, float] = MappingProxyType(
    {
        "gemm": 100.0,
        "attention": 100.0,
        "elementwise": 20.0,
        "reduction": 20.0,
        "layout": 20.0,
        "tile": 20.0,
        "lookup": 1.0,
    }
)


@dataclass(frozen=True, kw_only=True)
class HnModel:
    """Seconds on the HN: CN seconds / `speedup` for the operator's kind, but at least `floor_s`.

    The defaults are our assumptions about one data-centre GPU against one CPU core at the sizes of one request, far
    below the saturated ratio (MLPerf dlrm-v2: 19.75 M pairs/s on an H200, 20.5 k on a core). The floor is the cost
    of a kernel replayed from a graph.
    """

    speedup: Mapping[Kind, float] = field(default_factory=lambda: _SPEEDUP)
    floor_s: float = 1e-6

    def seconds(self, program: Program, cn_s: Mapping[str, float]) -> dict[str, float]:
        """Return the modelled seconds by node name."""
        nodes = [node for node in program.nodes if node.op != SIZE]
        kinds = {node.name: kind_of(node.op) if node.op != LOOKUP or is_bound(node) else "layout" for node in nodes}
        return {name: max(self.floor_s, cn_s[name] / self.speedup[kind]) for name, kind in kinds.items()}


def value_bytes(program: Program, *, candidates: int, ids_per_bag: Mapping[str, int], users: int = 1) -> dict[str, int]:
    """Return the bytes of every input and result of a tiled program.

    `ids_per_bag`: ids in one row of each bag (1 for a bag that is not named).
    """
    flat = flat_values(program)
    offsets = {name + OFFSETS for name in flat}
    found = {}
    values: list[Port | Node] = [*program.inputs, *(node for node in program.nodes if node.op != SIZE)]
    for value in values:
        count = users if value.rows == "user" else candidates
        if value.name in flat:
            count *= ids_per_bag.get(flat[value.name], 1)
        elif value.name in offsets:
            count += 1
        sizes = [count if size == ROWS else size for size in value.shape]
        item_bytes: int = getattr(torch, value.dtype).itemsize
        found[value.name] = prod(sizes) * item_bytes
    return found


def measure_seconds(
    program: Program,
    constants: Mapping[str, torch.Tensor],
    tables: Tables | None,
    tensors: Mapping[str, torch.Tensor],
    *,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Measure the median seconds of every operator on its own.

    Everything must be on one device; a GPU is waited for.
    """
    seconds: dict[str, float] = {}
    devices = {tensor.device for tensor in tensors.values()}

    def watch(node: Node, compute: Callable[[], Any]) -> Any:
        made, taken = compute(), []
        for _ in range(repeats):
            _synchronize(devices)
            start = clock()
            compute()
            _synchronize(devices)
            taken.append(clock() - start)
        seconds[node.name] = median(taken)
        return made

    run_reference(program, constants, tables, tensors, watch)
    return seconds


def cut_problem(
    program: Program,
    cn_s: Mapping[str, float],
    *,
    candidates: int,
    ids_per_bag: Mapping[str, int],
    hn: Mapping[str, float] | HnModel | None = None,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
) -> CutProblem:
    """Build the problem for the cutters.

    `hn`: seconds measured on the HN's device, or a model of it (by default the default `HnModel`).
    """
    if hn is None or isinstance(hn, HnModel):
        hn = (hn or HnModel()).seconds(program, cn_s)
    return CutProblem(
        program=program,
        candidates=candidates,
        value_bytes=value_bytes(program, candidates=candidates, ids_per_bag=ids_per_bag),
        cn_s=cn_s,
        hn_s=hn,
        link_bytes_per_s=link_bytes_per_s,
    )


def _synchronize(devices: Iterable[torch.device]) -> None:
    for device in devices:
        synchronize(device)
