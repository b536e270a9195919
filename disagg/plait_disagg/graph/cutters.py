"""The cutters by name: the exact one, and Prism's (Yang et al., NSDI'25), as far as it is known, as the baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Any, TypeAlias

import networkx as nx

from plait_disagg.graph.costs import CutProblem
from plait_disagg.graph.edit import reads
from plait_disagg.graph.operators import kind_of
from plait_disagg.graph.program import LOOKUP
from plait_disagg.graph.small_tables import is_bound
from plait_disagg.graph.split import crossing_values

Cutter: TypeAlias = Callable[[CutProblem], frozenset[str]]
"""Returns the names of the nodes that run on the CN, a cut that `check_cut` accepts. Pure: the same problem has the
same answer."""

_SOURCE, _SINK = ("end", "cn"), ("end", "hn")


def min_cut(problem: CutProblem) -> frozenset[str]:
    """Cut so that the cost (`costs.py`) is the least of all allowed cuts: a minimum s-t cut of a graph.

    Node v on the source side is a CN node. Its arcs:

        source -> v   capacity hn_s(v)      paid when v is on the HN; infinite for lookups that are bound
        v -> sink     capacity cn_s(v)      paid when v is on the CN
        u -> "u crosses"   bytes(u) / rate  paid once when u is on the CN and any reader on the HN
        "u crosses" -> v   infinite         for every reader v of u
        v -> u        infinite              for every value u that v reads: v on the CN and u on the HN is forbidden

    Capacities are whole picoseconds, so that the flow is exact.
    """
    _, (cn_side, _) = nx.minimum_cut(_network(problem), _SOURCE, _SINK)
    return frozenset(name for kind, name in cn_side if kind == "node")


def _network(problem: CutProblem) -> Any:
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    program, made_by = problem.program, reads(problem.program)
    bound = {node.name for node in program.nodes if is_bound(node)}
    readers: dict[str, list[tuple[str, str]]] = {}
    for name, read in made_by.items():
        network.add_edge(_SOURCE, ("node", name), **({} if name in bound else _ps(problem.hn_s[name])))
        network.add_edge(("node", name), _SINK, **_ps(problem.cn_s[name]))
        for value in read:
            readers.setdefault(value, []).append(("node", name))
            if value in made_by:
                network.add_edge(("node", name), ("node", value))
    for _, ref in program.outputs:
        readers.setdefault(ref.name, []).append(_SINK)
    for value, ends in readers.items():
        start = ("node", value) if value in made_by else _SOURCE
        network.add_edge(start, ("crosses", value), **_ps(problem.value_bytes[value] / problem.link_bytes_per_s))
        network.add_edges_from((("crosses", value), end) for end in ends)
    return network


def _ps(seconds: float) -> dict[str, int]:
    """Return the capacity of an arc; one without is infinite to networkx."""
    return {"capacity": round(seconds * 1e12)}


def prism_colouring(problem: CutProblem) -> frozenset[str]:
    """Cut by colouring; bytes count, seconds do not.

    The paper's text is not publicly available to us; a reading note describes it. Every matrix product and attention is
    a seed; the HN's part grows from the seeds along edges in both directions and stops at CPU-intensive operators
    (embedding lookups and whatever makes their ids). Two refinements: constants belong to the HN and are never sent
    (here this holds for both cutters), and when several crossing tensors come from one ancestor, the ancestor is sent
    if that is fewer bytes.
    """
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
