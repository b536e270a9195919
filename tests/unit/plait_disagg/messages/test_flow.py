"""What travels with batches for flow control, and what a peer that says nonsense gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait_disagg.messages.flow import Flow, due_of, flow_field, parse_flow, parse_queued_s
from plait_fabric.rpc.fields import WireError


def test_deadlines_survive_another_clock() -> None:
    """They travel as what is left, through JSON; whoever has none, has none there either."""
    flow = Flow(window=3, open=2, due_s=100.5, lost_s=None)
    header = json.loads(json.dumps({"flow": flow_field(flow, 100.0)}))
    assert parse_flow(header, 7_000.0) == Flow(window=3, open=2, due_s=7_000.5, lost_s=None)
    assert parse_flow({}, 0.0) == parse_flow({"flow": flow_field(Flow(), 5.0)}, 0.0) == Flow()
    whole = Flow(window=1, due_s=3.0, lost_s=4.0)
    assert parse_flow({"flow": flow_field(whole, 2.0)}, 2.0) == whole
    assert parse_queued_s({"queued_ms": 1.5}) == 0.0015
    assert parse_queued_s({}) == 0.0


def test_a_batch_is_as_urgent_as_its_first_request_and_lost_with_its_last() -> None:
    """One without a deadline is never lost."""
    assert due_of([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert due_of([3.0, None]) == (3.0, None)
    assert due_of([None, None]) == (None, None)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [0, 1],
        [1, None],
        [1, "x"],
        [1, 1, 1e30],
        [1, 1, 3.0, 4.0, 5.0],
        [True, 1],
    ],
)
def test_nonsense_is_refused(bad: Any) -> None:
    """By name, before anything of it is used."""
    with pytest.raises(WireError, match="flow"):
        parse_flow({"flow": bad}, 0.0)


@pytest.mark.parametrize("bad", ["1", None, -1.0, 1e30, [1], float("nan"), True])
def test_a_wait_that_is_no_time_is_refused(bad: Any) -> None:
    """It would move the window."""
    with pytest.raises(WireError, match="queued_ms"):
        parse_queued_s({"queued_ms": bad})
