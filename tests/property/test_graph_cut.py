"""The cutters against all possible cuts of random small programs."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.graph.costs import CutProblem
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.errors import BadCut
from plait_disagg.graph.split import check_cut, crossing_values, split
from support.graph import cost_s, cut_problems


def cheapest_s(problem: CutProblem) -> float:
    """The naive twin of the exact cutter: the cost of the best of all sets of nodes."""
    names = [node.name for node in problem.program.nodes]
    best = float("inf")
    for chosen in chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)):
        try:
            best = min(best, cost_s(problem, frozenset(chosen)))
        except BadCut:
            continue
    return best


@settings(max_examples=80)
@given(cut_problems())
def test_the_exact_cutter_finds_the_cheapest_cut(problem):
    """No allowed set of CN nodes costs less than the one that `min_cut` chooses."""
    assert cost_s(problem, CUTTERS["mincut"](problem)) == pytest.approx(cheapest_s(problem), abs=1e-10)


@settings(max_examples=80)
@given(cut_problems(), st.sampled_from(sorted(CUTTERS)))
def test_halves_hold_every_needed_node_once_and_cross_what_was_paid_for(problem, cutter):
    """A cut never sends a value back, keeps lookups on the CN, and is the same the second time; its two programs share
    no operator, lose none that an output needs, and their seam is what the cost counted."""
    chosen = CUTTERS[cutter](problem)
    check_cut(problem.program, chosen)
    assert chosen == CUTTERS[cutter](problem)
    halves = split(problem.program, chosen)
    cn, hn = ({node.name for node in half.nodes} for half in (halves.cn, halves.hn))
    assert not cn & hn
    assert cn <= chosen
    assert tuple(name for name, _ in halves.cn.outputs) == crossing_values(problem.program, chosen)
    needed = {ref.name for _, ref in problem.program.outputs}
    for node in reversed(problem.program.nodes):
        if node.name in needed:
            needed.update(node.inputs)
    assert needed & {node.name for node in problem.program.nodes} == cn | hn
