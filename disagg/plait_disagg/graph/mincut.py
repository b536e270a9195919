"""The exact cutter: the cheapest cut is a minimum s-t cut of a graph built from the program.

Node v on the source side is a CN node. Its arcs:

    source -> v   capacity hn_s(v)      paid when v is on the HN; infinite for lookups that are bound
    v -> sink     capacity cn_s(v)      paid when v is on the CN
    u -> "u crosses"   bytes(u) / rate  paid once when u is on the CN and any reader on the HN
    "u crosses" -> v   infinite         for every reader v of u
    v -> u        infinite              for every value u that v reads: v on the CN and u on the HN is forbidden

Capacities are whole picoseconds, so that the flow is exact.
"""

from __future__ import annotations

from typing import Any

import networkx as nx

from plait_disagg.graph.cut import CutProblem
from plait_disagg.graph.edit import reads
from plait_disagg.graph.small_tables import is_bound

_SOURCE, _SINK = ("end", "cn"), ("end", "hn")


def min_cut(problem: CutProblem) -> frozenset[str]:
    """Cut so that the cost (`cut.py`) is the least of all allowed cuts, to the picosecond."""
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
