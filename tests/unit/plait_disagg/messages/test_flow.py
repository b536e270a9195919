"""What travels with batches for flow control, and what a peer that says nonsense gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait_disagg.errors import Busy
from plait_disagg.messages import wire
from plait_disagg.messages.wire import (
    DenseAsk,
    answers_message,
    dense_message,
    failures_header,
    parse_answers,
    parse_dense,
)
from plait_disagg.values import RankAnswer, RankTimings
from plait_fabric.layouts import parse_layout
from plait_fabric.memory.pool import Pool
from plait_fabric.rpc.fields import WireError

POOL = Pool.anonymous(1 << 16)
LAYOUT = parse_layout("f4:i::a")
ROWS = {"a": torch.zeros(2)}
BUFFERS = [memoryview(bytearray(8))]


def crossed(clock: pytest.MonkeyPatch, deadlines: Sequence[float | None], **changes: Any) -> DenseAsk:
    """A batch that leaves at 100 s, through JSON, and arrives at 7,000 s on another clock."""
    clock.setattr(wire, "time", SimpleNamespace(monotonic=lambda: 100.0))
    message = dense_message(1, LAYOUT, ROWS, [2], POOL, wire="float32", window=3, open_calls=2, deadlines=deadlines)
    clock.setattr(wire, "time", SimpleNamespace(monotonic=lambda: 7_000.0))
    return parse_dense(json.loads(json.dumps(message[0])) | changes, BUFFERS, LAYOUT)


@pytest.mark.parametrize(
    ("deadlines", "due_s", "lost_s"),
    [([103.0, 101.0, 102.0], 7_001.0, 7_003.0), ([103.0, None], 7_003.0, None), ([None, None], None, None)],
)
def test_deadlines_survive_another_clock(
    monkeypatch: pytest.MonkeyPatch, deadlines: list[float | None], due_s: float | None, lost_s: float | None
) -> None:
    """They travel as what is left. A batch is as urgent as its first request and lost with its last; one without a
    deadline is never lost."""
    ask = crossed(monkeypatch, deadlines)
    assert (ask.window, ask.open, ask.due_s, ask.lost_s) == (3, 2, due_s, lost_s)


@pytest.mark.parametrize(
    "change",
    [
        {"window": 0}, {"window": None}, {"window": True}, {"open": 1.0}, {"open": 0}, {"due_s": "x"},
        {"due_s": float("inf")}, {"lost_s": [1.0]}, {"lost_s": True},
    ],
)  # fmt: skip
def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """By name, before anything of it is used."""
    with pytest.raises(WireError, match=next(iter(change))):
        crossed(monkeypatch, [101.0], **change)


@pytest.mark.parametrize("bad", ["1", None, -1.0, 1e30, [1], float("nan"), True])
def test_a_wait_that_is_no_time_is_refused(bad: Any) -> None:
    """It would move the window. A batch that was not computed has none."""
    timings = RankTimings(queued_ms=1.5, dense_ms=2.0)
    header, _ = answers_message([(1, RankAnswer(outputs=ROWS, timings=timings))], LAYOUT, POOL)
    ((number, done),) = parse_answers(header, BUFFERS, LAYOUT)
    assert isinstance(done, RankAnswer)
    assert (number, done.timings) == (1, timings)
    ((number, failed),) = parse_answers(failures_header([(1, Busy("x"))]), [], LAYOUT)
    assert isinstance(failed, Busy)
    for place in (0, 3):
        ms = [1.5, 0.0, 0.0, 2.0]
        ms[place] = bad
        with pytest.raises(WireError, match="time"):
            parse_answers(header | {"answers": [[1, 2, 0, "", *ms]]}, BUFFERS, LAYOUT)
