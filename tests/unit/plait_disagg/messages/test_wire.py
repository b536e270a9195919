"""Messages between workers as foreign input: what is wrong is refused, whatever is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ranking_model as kit
from plait_disagg.errors import BadInput, Busy, DeadlinePassed, RankError, UnknownModel, WorkerUnavailable
from plait_disagg.messages.layout import (
    LayoutError,
    RowCounts,
    decode,
    describe,
    encode,
    layout_of_inputs,
    parse_layout,
)
from plait_disagg.messages.packing import pack, plan_of, unpack
from plait_disagg.messages.wire import (
    VERSION,
    answers_message,
    card_from_json,
    card_to_json,
    check_role,
    dense_message,
    done_message,
    failed_header,
    parse_answers,
    parse_card,
    parse_dense,
    parse_done,
    parse_rank,
    parse_version,
    rank_message,
    version_header,
)
from plait_disagg.queue.batch import cut
from plait_disagg.values import RankAnswer, RankTimings
from plait_fabric.memory.pool import Pool
from plait_fabric.rpc.fields import WireError
from plait_fabric.rpc.handshake import read_greeting
from support.rank_fabric import hello_header, welcome_header

POOL = Pool.anonymous(1 << 22)


def _views(buffers: Any) -> list[memoryview]:
    return [memoryview(bytearray(buffer.memory if hasattr(buffer, "memory") else buffer)) for buffer in buffers]


@pytest.mark.parametrize("rows", [2, 400])
def test_tensors_that_lie_end_to_end_are_packed_as_any_others(rows: int) -> None:
    """The naive twin's bytes, whether neighbours in memory, out of order, apart, cut off, not contiguous or empty."""
    memory = torch.randn(8 * rows, 32)
    first, second, third, _ = memory.split([rows, 2 * rows, rows, 4 * rows])
    empty, crosswise = memory[:0], torch.randn(32, rows).t()
    alone = torch.randn(rows, 7)
    for tensors in (
        [first, second, third], [second, first], [first, third], [first, crosswise], [crosswise], [empty, first],
        [first, second, alone], [memory[1:][:rows], first], [first[:, :7], alone], [empty],
    ):  # fmt: skip
        named = {f"t{index}": tensor for index, tensor in enumerate(tensors)}
        layout, counts = describe(named, users=rows, items=2 * rows)
        plan = plan_of(named, users=rows, items=2 * rows)
        assert plan.layout == layout
        mine, twin = _views(pack(plan, named, POOL, timeout_s=1)), _views(encode(layout, named, POOL, timeout_s=1))
        assert [bytes(view) for view in mine] == [bytes(view) for view in twin]
        assert all(torch.equal(value, named[name]) for name, value in unpack(layout, mine, counts).items())


def test_a_card_survives_the_wire() -> None:
    """Every field, and what is no card is refused."""
    card = dataclasses.replace(kit.CARD, items=12, mode="split")
    assert card_from_json(card_to_json(card)) == card
    assert parse_card(read_greeting("welcome", VERSION, welcome_header(card))) == card
    for field in card_to_json(card):
        data = card_to_json(card)
        del data[field]
        with pytest.raises(ValueError, match="card"):
            card_from_json(data)
        with pytest.raises(WireError):
            broken = {**welcome_header(card), "card": {**card_to_json(card), field: object()}} | {"version": 0}
            parse_card(read_greeting("welcome", VERSION, broken))


def test_outcomes_survive_the_wire() -> None:
    """Answers of several requests and each kind of error, with numbers, times and bytes."""
    requests = [kit.request(seed, 1 + seed) for seed in range(3)]
    timings = RankTimings(queued_ms=1.5, lookup_ms=2.0, wire_ms=3.0, dense_ms=4.0)
    answers = [RankAnswer(outputs=kit.expected(r), timings=timings, bytes_crossed=7) for r in requests]
    errors = [
        kind(f"about {kind.__name__}", param="x", retry_after_s=2.5)
        for kind in (BadInput, UnknownModel, Busy, DeadlinePassed, WorkerUnavailable, RankError)
    ]
    header, buffers = answers_message(list(enumerate([*answers, *errors])), POOL)
    arrived = dict(parse_answers(header, _views(buffers)))
    assert sorted(arrived) == list(range(9))
    for number, answer in enumerate(answers):
        got = arrived[number]
        assert isinstance(got, RankAnswer)
        assert (got.timings, got.bytes_crossed) == (timings, 7)
        assert all(torch.equal(got.outputs[name], value) for name, value in answer.outputs.items())
    for number, error in enumerate(errors, start=3):
        got = arrived[number]
        assert type(got) is type(error)
        assert isinstance(got, RankError)
        assert (got.message, got.param, got.retry_after_s) == (error.message, "x", 2.5)


def test_batches_and_their_ends_survive_the_wire() -> None:
    """Crossing tensors, outputs, and a failure."""
    requests = [kit.request(seed, 2 + seed) for seed in range(2)]
    crossing = kit.FakeSparse().run(requests)
    ask = parse_dense(*_message(dense_message(3, crossing, [2, 3], POOL, wire="float32")))
    assert (ask.number, ask.candidates, ask.mergeable) == (3, (2, 3), True)
    assert all(torch.equal(ask.crossing[name], value) for name, value in crossing.items())
    outputs = kit.FakeDense().run(ask.crossing, ask.candidates)
    number, done = parse_done(*_message(done_message(3, outputs, 1.25, POOL)))
    assert number == 3
    assert not isinstance(done, RankError)
    assert done[1] == 1.25
    assert [part["pair"].shape for part in cut(done[0], [2, 3])] == [(2, 2), (3, 2)]
    number, failed = parse_done(failed_header(4, BadInput("no")), [])
    assert isinstance(failed, BadInput)


def test_ids_keep_batches_apart() -> None:
    """Only rows of floats may be laid end to end; ids could be offsets."""
    crossing = {"item": torch.zeros(2, 4), "ids": torch.zeros(2, dtype=torch.int64)}
    assert not parse_dense(*_message(dense_message(1, crossing, [2], POOL, wire="float32"))).mergeable


def test_a_number_that_float16_lacks_travels_as_float32() -> None:
    """Nothing becomes infinite on the way; what was infinite or NaN stays so."""
    for value in (70000.0, -1e30, float("inf"), float("nan")):
        for rows in (2, 3000):  # with and without a lease
            crossing = {"price": torch.full((rows, 1), value)}
            ask = parse_dense(*_message(dense_message(1, crossing, [rows], POOL, wire="float16")))
            torch.testing.assert_close(ask.crossing["price"], crossing["price"], equal_nan=True, rtol=0, atol=0)


def test_no_lease_is_left_behind_when_encoding_fails() -> None:
    """Whatever was leased before the fault goes back."""
    pool = Pool.anonymous(1 << 20)
    tensors = {"a": torch.zeros(4000, 1, dtype=torch.int64), "b": torch.full((4000, 1), 1e9)}
    layout, _ = describe(tensors, users=1, items=4000, wire="float16")
    with pytest.raises(OverflowError):
        encode(layout, tensors, pool, timeout_s=1.0)
    assert pool.statistics().leases == 0


@pytest.mark.parametrize(
    "text",
    [
        "f4:u:1", "f4:u:1::a", "x4:u:1:a", "f4:x:1:a", "f4:u:-1:a", "f4:u:1.5:a", "f4:u:1:a;f4:u:1:a", "f4:u:1:",
        "f4:u:1:a b", "f4:u:99999999,99999999:a", "q1:u::a", "q1:u:0:a", "f4:u:1,1,1,1,1,1,1,1,1:a", "f4:u:²:a", ";",
        "f4:u:1:" + "a" * 300,
    ],
)  # fmt: skip
def test_layouts_that_make_no_sense_are_refused(text: str) -> None:
    """Before anything is allocated."""
    with pytest.raises(LayoutError):
        parse_layout(text)


@pytest.mark.parametrize("counts", [RowCounts(users=1, items=3), RowCounts(users=1, items=2, flat=(5,))])
def test_buffers_must_be_what_the_layout_says(counts: RowCounts) -> None:
    """Neither more nor less, and as many sections."""
    layout = parse_layout("f4:i:2:a;i8:u::b")
    right = [memoryview(bytearray(16)), memoryview(bytearray(8))]
    for read in (decode, unpack):
        assert read(layout, right, RowCounts(users=1, items=2))["a"].shape == (2, 2)
        for buffers in (right, right[:1], [right[1], right[0]], [*right, right[0]]):
            with pytest.raises(LayoutError):
                read(layout, buffers, counts)


def test_what_has_no_rows_or_no_code_does_not_travel() -> None:
    """Told when it is sent."""
    with pytest.raises(LayoutError, match="number"):
        describe({"a": torch.tensor(1.0)}, users=1, items=1)
    with pytest.raises(LayoutError, match="complex"):
        describe({"a": torch.zeros(1, dtype=torch.complex64)}, users=1, items=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(st.data())
def test_no_header_gets_past_the_parsers(data: st.DataObject) -> None:
    """A right message with some fields replaced by anything is right still, or a `WireError`; nothing else happens."""
    request, layout = kit.request(1, 4), layout_of_inputs(kit.INPUTS)
    crossing = kit.FakeSparse().run([request])
    answer = RankAnswer(outputs=kit.expected(request))
    parsers: list[tuple[tuple[Any, Any], Any]] = [
        (rank_message(1, request, layout, POOL), lambda header, views: parse_rank(header, views, kit.CARD, layout)),
        (answers_message([(1, answer), (2, Busy("x"))], POOL), parse_answers),
        (dense_message(1, crossing, [4], POOL, wire="int8"), parse_dense),
        (done_message(1, kit.expected(request), 1.0, POOL), parse_done),
        ((failed_header(1, Busy("x")), []), parse_done),
        ((welcome_header(kit.CARD), []), lambda header, _: parse_card(read_greeting("welcome", VERSION, header))),
        ((version_header("2"), []), lambda header, _: parse_version(header)),
        ((hello_header("rank"), []), lambda header, _: check_role(read_greeting("hello", VERSION, header), "rank")),
    ]
    (header, buffers), parse = data.draw(st.sampled_from(parsers))
    changed = {**header}
    for key in data.draw(st.lists(st.sampled_from(sorted(header)), min_size=1, max_size=3)):
        changed[key] = data.draw(JSON)
    try:
        parse(changed, _views(buffers))
    except WireError:
        return


def _message(made: tuple[Any, Any]) -> tuple[Any, list[memoryview]]:
    header, buffers = made
    return header, _views(buffers)
