"""Tables small enough for the HN: programs are unchanged where nothing moves (`package/test_small_tables_package.py`
has one that does)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_disagg.graph.costs import Cuttable, cuttable
from plait_disagg.graph.edit import reads
from plait_disagg.graph.small_tables import offer, placed
from support.graph import model, table_rows


@pytest.fixture(scope="module")
def hstu() -> Cuttable:
    """The sequence model, tiled."""
    _, captured = model("hstu")
    rows = table_rows(captured)
    ready = cuttable(captured.program, captured.constants, captured.inputs, table_rows=rows, exact=False)
    return replace(ready, table_rows={"category_table": 128})  # as if there were as many items as there are


def test_what_stays_on_the_cn_is_as_it_was(hstu: Cuttable) -> None:
    """An offered lookup that the cut leaves on the CN reads the ids that it read before."""
    offered = offer(hstu.program, hstu.table_rows, dict.fromkeys(reads(hstu.program), 1 << 20))
    assert offered != hstu.program
    assert placed(offered, [node.name for node in offered.nodes]) == hstu.program


def test_lookups_that_would_gain_nothing_are_not_offered(hstu: Cuttable) -> None:
    """Of a table that is too large, saves too little or mends ids."""
    nbytes = dict.fromkeys(reads(hstu.program), 1 << 20)
    assert offer(hstu.program, {"category_table": 1 << 20}, nbytes) == hstu.program
    assert offer(hstu.program, {}, nbytes) == hstu.program
    assert offer(hstu.program, hstu.table_rows, dict.fromkeys(nbytes, 1_000)) == hstu.program
