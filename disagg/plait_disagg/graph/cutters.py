"""The cutters by name, and Prism's (Yang et al., NSDI'25), as far as it is known: the baseline beside `min_cut`.

The paper's text is not publicly available to us; a reading note describes it. Colouring: every matrix product and
attention is a seed; the HN's part grows from the seeds along edges in both directions and stops at CPU-intensive
operators (embedding lookups and whatever makes their ids). Two refinements: constants belong to the HN and are never
sent (here this holds for both cutters), and when several crossing tensors come from one ancestor, the ancestor is
sent if that is fewer bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Any

import networkx as nx

from plait_disagg.graph.cut import CutProblem, Cutter, crossing_values
from plait_disagg.graph.edit import reads
from plait_disagg.graph.mincut import min_cut
from plait_disagg.graph.operators import kind_of
from plait_disagg.graph.program import LOOKUP


def prism_colouring(problem: CutProblem) -> frozenset[str]:
    """Cut by colouring from the seeds; bytes count, seconds do not."""
    program, made_by = problem.program, reads(problem.program)
    graph: Any = nx.DiGraph((value, name) for name, read in made_by.items() for value in read)
    graph.add_nodes_from((*made_by, *(port.name for port in program.inputs)))
    lookups = {node.name for node in program.nodes if node.op == LOOKUP}
    fixed = lookups.union(*(nx.ancestors(graph, name) for name in lookups))
    free = graph.subgraph(made_by.keys() - fixed)
    seeds = {node.name for node in program.nodes if kind_of(node.op) in ("gemm", "attention")} & free.nodes
    grown = set[str]().union(*(part for part in nx.weakly_connected_components(free) if not seeds.isdisjoint(part)))
    hn = grown.union(*(nx.descendants(graph, name) for name in grown))  # so that nothing flows back

    def crossing(hn: Set[str]) -> tuple[str, ...]:
        return crossing_values(program, frozenset(made_by.keys() - hn))

    def crossing_bytes(hn: Set[str]) -> int:
        return sum(problem.value_bytes[value] for value in crossing(hn))

    while True:  # what is smaller than what is made of it crosses instead
        ancestors = set(crossing(hn)).union(*(nx.ancestors(graph, name) for name in crossing(hn)))
        moved = [hn | (nx.descendants(graph, name) - fixed) for name in sorted(ancestors)]
        best = min(moved, key=crossing_bytes, default=hn)
        if crossing_bytes(best) >= crossing_bytes(hn):
            return frozenset(made_by.keys() - hn)
        hn = best


CUTTERS: Mapping[str, Cutter] = MappingProxyType({"mincut": min_cut, "prism": prism_colouring})
"""The cutters by name: `mincut` (exact) and `prism` (the baseline)."""
