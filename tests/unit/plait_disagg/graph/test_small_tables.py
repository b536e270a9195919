"""Tables small enough for the HN: the cut of a sequence model, and programs that are unchanged where nothing moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_disagg.graph.cut import crossing_values
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.edit import reads
from plait_disagg.graph.errors import BadCut
from plait_disagg.graph.program import LOOKUP, Program
from plait_disagg.graph.small_tables import offer, placed
from plait_disagg.graph.split import split
from plait_disagg.package.costing import Cuttable, cut_problem, cuttable
from plait_disagg.tables.reference import SeparateTables
from support.graph import crossing_bytes, model, table_rows

CANDIDATES = 64


@pytest.fixture(scope="module")
def hstu() -> Cuttable:
    """The sequence model, tiled."""
    _, captured = model("hstu")
    rows = table_rows(captured)
    ready = cuttable(captured.program, captured.constants, captured.inputs, table_rows=rows, exact=False)
    return replace(ready, table_rows={"category_table": 128})  # as if there were as many items as there are


def _cut(ready: Cuttable) -> tuple[Program, frozenset[str], int]:
    """The program, the CN's nodes and the bytes that cross, by costs measured here."""
    _, captured = model("hstu")
    problem = cut_problem(ready, SeparateTables(captured.tables), candidates=CANDIDATES, ids_per_bag={})
    nodes = CUTTERS["mincut"].cut(problem)
    return problem.program, nodes, crossing_bytes(problem, nodes)


def test_the_cut_is_the_hand_made_one_and_better_by_the_small_table(hstu: Cuttable) -> None:
    """Embeddings on the CN and all else on the HN, as the public code has it by hand; with the table of categories at
    the HN, its ids cross in place of its rows, and nothing else changes."""
    by_hand, nodes, before = _cut(replace(hstu, table_rows={}))
    lookups = {node.name: str(node.kwargs["table"]) for node in by_hand.nodes if node.op == LOOKUP}
    assert lookups.keys() <= nodes
    assert not any("linear" in node.op for node in by_hand.nodes if node.name in nodes)
    crossing = crossing_values(by_hand, nodes)
    assert set(lookups) <= set(crossing)
    assert all(name in {*lookups, "history"} or node_is_mask(by_hand, name) for name in crossing)

    program, nodes, after = _cut(hstu)
    moved = {name for name, table in lookups.items() if table == "category_table"}
    assert nodes & lookups.keys() == lookups.keys() - moved
    # Costs are measured, so ids may cross as they came (int64) or as int32, and a mask as ids or as bytes.
    sent = set(crossing_values(program, nodes))
    assert all(sent & {ids, f"{ids}_int32"} for ids in ("history_category", "category"))
    rows = 200 + CANDIDATES
    assert before - after == pytest.approx(rows * (128 - 1) * 4, abs=200 * 8 + rows * 4)
    assert after < 0.55 * before


def node_is_mask(program: Program, name: str) -> bool:
    """Whether a value is made of the history's ids alone."""
    read = reads(program)
    return name in read and all(one == "history" or node_is_mask(program, one) for one in read[name])


def test_what_stays_on_the_cn_is_as_it_was(hstu: Cuttable) -> None:
    """An offered lookup that the cut leaves on the CN reads the ids that it read before."""
    offered = offer(hstu.program, hstu.table_rows, dict.fromkeys(reads(hstu.program), 1 << 20))
    assert offered != hstu.program
    assert placed(offered, [node.name for node in offered.nodes]) == hstu.program


def test_lookups_that_are_not_offered_stay_bound(hstu: Cuttable) -> None:
    """A table that is too large, saves too little or mends ids is not offered, and its lookups may not move."""
    nbytes = dict.fromkeys(reads(hstu.program), 1 << 20)
    assert offer(hstu.program, {"category_table": 1 << 20}, nbytes) == hstu.program
    assert offer(hstu.program, {}, nbytes) == hstu.program
    assert offer(hstu.program, hstu.table_rows, dict.fromkeys(nbytes, 1_000)) == hstu.program
    with pytest.raises(BadCut, match="must run on the CN"):
        split(hstu.program, [])
