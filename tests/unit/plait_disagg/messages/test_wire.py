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
from plait_disagg.graph.program import Port
from plait_disagg.messages.layout import layout_of_crossing, layout_of_inputs
from plait_disagg.messages.wire import (
    VERSION,
    answers_message,
    card_payload,
    check_role,
    dense_message,
    failures_header,
    parse_answers,
    parse_card,
    parse_crossing,
    parse_dense,
    parse_rank,
    parse_version,
    rank_message,
    version_header,
)
from plait_disagg.request_log import on_behalf_of
from plait_disagg.values import RankAnswer, RankTimings
from plait_fabric import MessageLimits
from plait_fabric.layouts import LayoutError, Part, RowCounts, layout_of, pack, parse_layout, unpack
from plait_fabric.memory.pool import Pool
from plait_fabric.rpc.fields import WireError, read_greeting
from plait_fabric.transport.frames import encode_header
from support.layout_twin import describe
from support.rank_fabric import CROSSING, OUTPUTS, hello_header, welcome_header

POOL = Pool.anonymous(1 << 22)


def _views(buffers: Any) -> list[memoryview]:
    return [memoryview(bytearray(buffer.memory if hasattr(buffer, "memory") else buffer)) for buffer in buffers]


def test_a_card_survives_the_wire() -> None:
    """Every field, and what is no card is refused."""
    card = dataclasses.replace(kit.CARD, items=12, mode="split")
    assert parse_card(read_greeting("welcome", VERSION, welcome_header(card))) == card
    said = card_payload(card)["card"]
    for field in said:
        for broken in ({**said, field: object()}, {name: value for name, value in said.items() if name != field}):
            if not isinstance(said[field], str) or field not in broken:  # anything can be made a text
                with pytest.raises(WireError, match="card"):
                    parse_card({"card": broken})
    for nothing in ({}, {"card": None}, {"card": []}, {"card": {**said, "largest_candidates": float("inf")}}):
        with pytest.raises(WireError, match="card"):
            parse_card(nothing)


def test_outcomes_survive_the_wire() -> None:
    """Answers of several requests and each kind of error, with numbers, times and bytes."""
    requests = [kit.request(seed, 1 + seed) for seed in range(3)]
    timings = RankTimings(queued_ms=1.5, lookup_ms=2.0, wire_ms=3.0, dense_ms=4.0)
    answers = [RankAnswer(outputs=kit.expected(r), timings=timings, bytes_crossed=7) for r in requests]
    errors = [
        kind(f"about {kind.__name__}", param="x", retry_after_s=2.5)
        for kind in (BadInput, UnknownModel, Busy, DeadlinePassed, WorkerUnavailable, RankError)
    ]
    header, buffers = answers_message(list(enumerate([*answers, *errors])), OUTPUTS, POOL)
    arrived = dict(parse_answers(header, _views(buffers), OUTPUTS))
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.float16])
def test_outputs_of_any_dtype_arrive_as_float32(dtype: torch.dtype) -> None:
    """As a model's description says of them: one that compares its score with a number computes booleans."""
    computed = {name: (value > 0).to(dtype) for name, value in kit.expected(kit.request(0, 3)).items()}
    made = answers_message([(1, RankAnswer(outputs=computed))], OUTPUTS, POOL)
    ((_, answer),) = parse_answers(*_message(made), OUTPUTS)
    assert isinstance(answer, RankAnswer)
    assert answer.outputs.keys() == computed.keys()
    assert all(torch.equal(answer.outputs[name], value.to(torch.float32)) for name, value in computed.items())


def test_headers_say_nothing_of_the_tensors() -> None:
    """Both ends know them since they greeted each other: however many there are, a message says how many rows."""
    many = {f"a_rather_long_name_of_a_table_{n}": torch.zeros(3, 4) for n in range(500)}
    layout, _ = describe(many, users=2, items=3)
    outputs = layout_of([Part("f4", "i", (4,), name) for name in many])
    answers = [(n, RankAnswer(outputs=many)) for n in range(2)]
    for header, _ in (
        dense_message(1, layout, many, [1, 2], POOL, wire="float32"),
        answers_message(answers, outputs, POOL),
    ):
        assert len(encode_header(header)) < 200


def test_a_batch_names_no_more_requests_than_fit_its_header() -> None:
    """Long ids of many requests do not make a batch too large for the fabric, or for who reads it."""
    layout, scores = parse_layout("f4:i::a"), {"a": torch.zeros(600)}
    with on_behalf_of(lambda: [f"{number}-" + "x" * 400 for number in range(600)]):
        made = dense_message(1, layout, scores, [1] * 600, POOL, wire="float32")
    MessageLimits().check(header_bytes=len(encode_header(made[0])), buffers=0, message_bytes=0)
    assert parse_dense(*_message(made), layout).requests[0].startswith("0-xx")


@pytest.mark.parametrize("dtype", ["int8", "int16", "bfloat16", "float16"])
def test_what_was_cast_to_a_small_type_crosses_as_such(dtype: str) -> None:
    """Also in a wire format that has fewer bytes for floats."""
    layout = layout_of_crossing([Port(name="a", shape=(-1, 3), dtype=dtype, rows="item")], ())
    crossing = {"a": torch.arange(6).view(2, 3).to(getattr(torch, dtype))}
    ask = parse_dense(*_message(dense_message(1, layout, crossing, [2], POOL, wire="float16")), layout)
    assert ask.crossing["a"].dtype is crossing["a"].dtype
    assert torch.equal(ask.crossing["a"], crossing["a"])


def test_a_number_that_float16_lacks_travels_as_float32() -> None:
    """Nothing becomes infinite on the way; what was infinite or NaN stays so."""
    for value in (70000.0, -1e30, float("inf"), float("nan")):
        for rows in (2, 3000):  # with and without a lease
            crossing = {"price": torch.full((rows, 1), value)}
            layout, _ = describe(crossing, users=1, items=rows)
            ask = parse_dense(*_message(dense_message(1, layout, crossing, [rows], POOL, wire="float16")), layout)
            torch.testing.assert_close(ask.crossing["price"], crossing["price"], equal_nan=True, rtol=0, atol=0)


def test_no_lease_is_left_behind_when_encoding_fails() -> None:
    """Whatever was leased before the fault goes back."""
    pool = Pool.anonymous(1 << 20)
    tensors = {"a": torch.zeros(4000, 1, dtype=torch.int64), "b": torch.full((4000, 1), 1e9)}
    layout, counts = describe(tensors, users=1, items=4000, wire="float16")
    with pytest.raises(OverflowError):
        pack(layout, counts, tensors, pool, timeout_s=1.0)
    assert pool.statistics().leases == 0


@pytest.mark.parametrize(
    "text",
    [
        "f4:u:1", "x4:u:1:a", "f4:x:1:a", "f4:u:-1:a", "f4:u:1.5:a", "f4:u:1:a;f4:u:1:a", "f4:u:1:",
        "f4:u:99999999,99999999:a", "q1:u::a", "q1:u:0:a", "f4:u:1,1,1,1,1,1,1,1,1:a", "f4:u:²:a", ";",
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
    assert unpack(layout, RowCounts(users=1, items=2), right)["a"].shape == (2, 2)
    for buffers in (right, right[:1], [right[1], right[0]], [*right, right[0]]):
        with pytest.raises(LayoutError):
            unpack(layout, counts, buffers)


def test_what_has_no_rows_or_no_code_does_not_travel() -> None:
    """Told when it is sent."""
    for port in (
        Port(name="a", shape=(), dtype="float32", rows="none"),
        Port(name="a", shape=(-1, -1), dtype="float32", rows="item"),
    ):
        with pytest.raises(LayoutError, match="no tensor with rows"):
            layout_of_crossing([port], ())
    with pytest.raises(LayoutError, match="complex"):
        layout_of_crossing([Port(name="a", shape=(-1,), dtype="complex64", rows="item")], ())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0), torch.zeros(2, 2), torch.zeros(4, 3), torch.zeros(4, 2, 1), torch.zeros(4, 2).double(),
    ],
)  # fmt: skip
def test_tensors_must_be_what_the_layout_says(tensor: torch.Tensor) -> None:
    """A number, other rows, another tail, another dtype: told when it is sent, beside others and alone."""
    parts = [Part("f4", "i", (2,), "a"), Part("f4", "i", (2,), "b")]
    for layout in (layout_of(parts[:1]), layout_of(parts)):
        with pytest.raises(LayoutError, match="a "):
            pack(layout, RowCounts(items=4), {"a": tensor, "b": torch.zeros(4, 2)}, POOL, timeout_s=1.0)
    in_two = {"a": [torch.zeros(1, 2), torch.ones(3, 2)], "b": torch.zeros(4, 2)}
    views = _views(pack(layout, RowCounts(items=4), in_two, POOL, timeout_s=1.0))
    assert unpack(layout, RowCounts(items=4), views)["a"].sum() == 6


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
    answer, welcome = RankAnswer(outputs=kit.expected(request)), (welcome_header(kit.CARD), [])
    parsers: list[tuple[tuple[Any, Any], Any]] = [
        (rank_message(1, request, layout, POOL), lambda *it: parse_rank(*it, kit.CARD, layout)),
        (answers_message([(1, answer), (2, Busy("x"))], OUTPUTS, POOL), lambda *it: parse_answers(*it, OUTPUTS)),
        (dense_message(1, CROSSING, crossing, [4], POOL, wire="int8"), lambda *it: parse_dense(*it, CROSSING)),
        ((failures_header([(1, Busy("x"))]), []), lambda *it: parse_answers(*it, OUTPUTS)),
        (welcome, lambda header, _: parse_crossing(read_greeting("welcome", VERSION, header))),
        (welcome, lambda header, _: parse_card(read_greeting("welcome", VERSION, header))),
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
