"""Messages between base replicas and ControlNet services: what is sent arrives, anything else is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_fabric.rpc.fields import WireError, greeting, read_greeting
from plait_serving.diffusion.controlnet import wire
from plait_serving.diffusion.controlnet.wire import (
    VERSION,
    Call,
    Close,
    Open,
    Reply,
    Step,
    error_of,
    parse_reply,
    parse_request,
    parse_welcome,
)
from plait_serving.diffusion.errors import EngineError, ModelError
from plait_serving.diffusion.protocols import Conditioning, Residuals

TEXT = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
IMAGE = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
SAMPLE = torch.ones(2, 4, 2, 2)


def _open(**added: torch.Tensor) -> tuple[wire.Header, dict[str, torch.Tensor]]:
    conditioning = Conditioning(text=TEXT, added=added, n=1)
    header, tensors = wire.open_message(Open(session=3, image=IMAGE, conditioning=conditioning, width=32, height=16))
    return header, dict(tensors)


def _step() -> tuple[wire.Header, dict[str, torch.Tensor]]:
    calls = (
        Call(session=3, sample=SAMPLE, timestep=981.0, scale=0.1),
        Call(session=4, sample=SAMPLE * 2, timestep=1, scale=-1),
    )
    header, tensors = wire.step_message(8, calls)
    return header, dict(tensors)


def _parse_welcome(header: wire.Header, _: object) -> str:
    return parse_welcome(read_greeting("welcome", VERSION, header))


def test_requests_arrive_as_sent() -> None:
    """Every request survives the round through its message."""
    assert read_greeting("hello", VERSION, greeting("hello", VERSION, {})) == {}
    assert parse_request(wire.close_header(9), {}) == Close(session=9)
    opened = parse_request(*_open(text_embeds=torch.ones(2, 7), time_ids=torch.zeros(2, 6)))
    assert isinstance(opened, Open)
    assert (opened.session, opened.width, opened.height) == (3, 32, 16)
    assert np.array_equal(opened.image, IMAGE)
    assert torch.equal(opened.conditioning.text, TEXT)
    assert set(opened.conditioning.added) == {"text_embeds", "time_ids"}
    assert (opened.conditioning.n, opened.conditioning.branches) == (1, 2)
    step = parse_request(*_step())
    assert isinstance(step, Step)
    assert [(call.session, call.timestep, call.scale) for call in step.calls] == [(3, 981.0, 0.1), (4, 1.0, -1.0)]
    assert torch.equal(step.calls[1].sample, SAMPLE * 2)


def test_replies_arrive_as_sent() -> None:
    """Residuals and errors keep their places."""
    good = Residuals(down=(SAMPLE, SAMPLE + 1), mid=SAMPLE + 2)
    header, tensors = wire.reply_message(Reply(seq=5, answers=(("invalid_model", "no"), good)))
    reply = parse_reply(header, tensors)
    assert (reply.seq, reply.answers[0]) == (5, ("invalid_model", "no"))
    assert isinstance(reply.answers[1], Residuals)
    assert torch.equal(reply.answers[1].down[1], SAMPLE + 1)
    assert torch.equal(reply.answers[1].mid, SAMPLE + 2)
    assert (
        parse_welcome(read_greeting("welcome", VERSION, greeting("welcome", VERSION, wire.welcome_payload("edges"))))
        == "edges"
    )


def test_long_error_messages_are_cut() -> None:
    """A message of megabytes does not blow the header."""
    header, _ = wire.reply_message(Reply(seq=0, answers=(("engine_error", "x" * 1_000_000),)))
    assert len(header["errors"][0][1]) == 2_000


def test_a_step_with_the_most_calls_fits_one_message() -> None:
    """32 calls of 13 residual tensors stay within the fabric's default limits."""
    from plait_fabric import MessageLimits
    from plait_fabric.transport.frames import encode_header

    residuals = Residuals(down=(SAMPLE,) * 12, mid=SAMPLE)
    header, tensors = wire.reply_message(Reply(seq=2**53 - 1, answers=(residuals,) * wire.MAX_CALLS))
    described = [[name, "bfloat16", [64, 1280, 128, 128], [0, 2, 3, 1]] for name in tensors]
    MessageLimits().check(
        header_bytes=len(encode_header({**header, "_tensors": described})), buffers=len(tensors), message_bytes=0
    )


@pytest.mark.parametrize("change", [
    {"op": "pickle"}, {"op": None}, {"session": -1}, {"session": True}, {"session": 2**53}, {"session": "3"},
    {"width": 0}, {"width": 10**6}, {"height": 3.5}, {"n": 0}, {"n": 10**6}, {"cfg": 1}, {"extra": 1},
])  # fmt: skip
def test_bad_open_headers_are_refused(change: dict[str, object]) -> None:
    """Every field of open is checked for type and range; unknown fields are refused."""
    header, tensors = _open()
    with pytest.raises(WireError):
        parse_request(header | change, tensors)


@pytest.mark.parametrize("change", [
    {"image": torch.zeros(5, 6, 3)}, {"image": torch.zeros(5, 6, dtype=torch.uint8)},
    {"image": torch.zeros(5, 6, 4, dtype=torch.uint8)}, {"text": torch.zeros(1, 3, 4)},
    {"text": torch.zeros(2, 3, 4, dtype=torch.int64)}, {"added.other": torch.zeros(2, 3)},
    {"added.time_ids": torch.zeros(1, 6)}, {"more": torch.zeros(1)},
])  # fmt: skip
def test_bad_open_tensors_are_refused(change: dict[str, torch.Tensor]) -> None:
    """Shapes and dtypes of an open's tensors are checked; unknown tensors are refused."""
    header, tensors = _open()
    with pytest.raises(WireError):
        parse_request(header, tensors | change)


@pytest.mark.parametrize("calls", [
    [], [[3, 1.0, 1.0]], [[3, 1.0, 1.0, True, 1]], [[3, 1.0, 1.0, 1.0]], [["3", 1.0, 1.0, True]],
    [[3, math.nan, 1.0, True]], [[3, 1.0, math.inf, True]], [[3, "1", 1.0, True]], [[3, True, 1.0, True]], "calls",
    [[3, 1.0, 1.0, True]] * 33,
])  # fmt: skip
def test_bad_calls_are_refused(calls: object) -> None:
    """A call is a session number, two finite numbers and a boolean, and there are neither none nor too many."""
    header, _ = _step()
    tensors = {f"sample.{i}": SAMPLE for i in range(len(calls))}  # type: ignore[arg-type]
    with pytest.raises(WireError):
        parse_request(header | {"calls": calls}, tensors)


def test_bad_samples_are_refused() -> None:
    """Samples are four-dimensional floats of one shape and dtype, one for each call."""
    header, tensors = _step()
    for bad in (torch.ones(2, 4, 2), torch.ones(2, 4, 2, 2, dtype=torch.int32), torch.ones(2, 4, 3, 2), SAMPLE.half()):
        with pytest.raises(WireError):
            parse_request(header, tensors | {"sample.1": bad})
    with pytest.raises(WireError):
        parse_request(header, {"sample.0": SAMPLE})


@pytest.mark.parametrize("change", [
    {"op": "welcome"}, {"seq": -1}, {"seq": 1.0}, {"errors": []}, {"errors": [None]}, {"errors": [["a"], None]},
    {"errors": [["a", "b"], ["c", "d"]]}, {"errors": {}}, {"more": 1},
])  # fmt: skip
def test_bad_replies_are_refused(change: dict[str, object]) -> None:
    """A reply's errors and tensors must fit each other."""
    good = Residuals(down=(SAMPLE,), mid=SAMPLE)
    header, tensors = wire.reply_message(Reply(seq=5, answers=(("invalid_model", "no"), good)))
    with pytest.raises(WireError):
        parse_reply(header | change, tensors)


@pytest.mark.parametrize("names", [{"1.0"}, {"1.mid", "1.1"}, {"1.mid", "0.mid"}, {"mid"}, {"1.mid", "1.x"}, set()])
def test_bad_reply_tensors_are_refused(names: set[str]) -> None:
    """A call's tensors are 0, 1, ..., mid, without gaps and for calls that worked only."""
    header = {"op": "residuals", "seq": 0, "errors": [["a", "b"], None]}
    with pytest.raises(WireError):
        parse_reply(header, dict.fromkeys(names, SAMPLE))


def test_another_version_is_refused() -> None:
    """Client and service must speak the same version."""
    with pytest.raises(WireError, match="version"):
        _parse_welcome(greeting("welcome", VERSION, wire.welcome_payload("edges")) | {"version": VERSION + 1}, {})


def test_errors_keep_their_kind() -> None:
    """A known code becomes the engine's error of that code; an unknown one a plain EngineError."""
    assert type(error_of("invalid_model", "x")) is ModelError
    assert type(error_of("whatever", "x")) is EngineError


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_fields = st.sampled_from(["op", "session", "width", "height", "n", "cfg", "seq", "calls", "errors", "version"])
_tensor = st.sampled_from([SAMPLE, TEXT, torch.zeros(0), torch.from_numpy(IMAGE), torch.zeros(2, 6)])
_names = st.sampled_from(["image", "text", "sample.0", "sample.1", "0.0", "0.mid", "mid", "added.time_ids", ""])


@settings(max_examples=200)
@given(
    op=st.sampled_from(["hello", "open", "step", "close", "residuals", "welcome"]) | _json,
    header=st.dictionaries(_fields, _json, max_size=8),
    tensors=st.dictionaries(_names, _tensor, max_size=4),
)
def test_whatever_arrives_is_parsed_or_refused(
    op: object, header: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    """No header and no tensors make a parser fail in any other way than `WireError`."""
    for parse in (
        parse_request,
        parse_reply,
        _parse_welcome,
    ):
        try:
            parse(header | {"op": op}, tensors)
        except WireError:
            continue
