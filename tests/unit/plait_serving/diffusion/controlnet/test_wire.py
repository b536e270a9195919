"""Messages between base replicas and ControlNet services: what is sent arrives, anything else is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_fabric import MessageLimits
from plait_fabric.rpc.fields import WireError, read_greeting
from plait_fabric.transport.frames import encode_header
from plait_serving.diffusion.controlnet import wire
from plait_serving.diffusion.controlnet.wire import (
    VERSION,
    Open,
    parse_reply,
    parse_request,
    parse_welcome,
)
from plait_serving.diffusion.errors import EngineError, ModelError
from plait_serving.diffusion.protocols import Conditioning, ControlCall, Residuals

TEXT = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
IMAGE = np.arange(5 * 6 * 3, dtype=np.uint8).reshape(5, 6, 3)
SAMPLE = torch.ones(2, 4, 2, 2)


def _open(**added: torch.Tensor) -> tuple[wire.Header, dict[str, torch.Tensor]]:
    conditioning = Conditioning(text=TEXT, added=added, n=1)
    header, tensors = wire.open_message(Open(session=3, image=IMAGE, conditioning=conditioning, width=32, height=16))
    return header, dict(tensors)


def _step() -> tuple[wire.Header, dict[str, torch.Tensor]]:
    calls = (
        ControlCall(session=3, sample=SAMPLE, timestep=torch.tensor(981.0), scale=0.1),
        ControlCall(session=4, sample=SAMPLE * 2, timestep=torch.tensor(1), scale=-1),
    )
    header, tensors = wire.step_message(8, calls)
    return header, dict(tensors)


def _reply(error: str = "no") -> tuple[wire.Header, wire.Tensors]:
    good = Residuals(down=(SAMPLE, SAMPLE + 1), mid=SAMPLE + 2)
    return wire.reply_message(5, [ModelError(error), good, EngineError("whatever")])


def _parse_welcome(header: wire.Header, _: object) -> str:
    return parse_welcome(read_greeting("welcome", VERSION, header))


def test_a_request_arrives_as_sent() -> None:
    """With SDXL's text, and sides that differ."""
    opened = parse_request(*_open(text_embeds=torch.ones(2, 7), time_ids=torch.zeros(2, 6)))
    assert isinstance(opened, Open)
    assert (opened.session, opened.width, opened.height) == (3, 32, 16)
    assert np.array_equal(opened.image, IMAGE)
    assert torch.equal(opened.conditioning.text, TEXT)
    assert torch.equal(opened.conditioning.added["text_embeds"], torch.ones(2, 7))
    assert (opened.conditioning.n, opened.conditioning.branches, len(opened.conditioning.added)) == (1, 2, 2)


def test_errors_keep_their_place_and_kind() -> None:
    """Beside residuals; a message of megabytes does not blow the header."""
    seq, (error, good, unnamed) = parse_reply(*_reply())
    assert (seq, type(error), str(error), type(unnamed)) == (5, ModelError, "no", EngineError)
    assert isinstance(good, Residuals)
    header, _ = _reply("x" * 1_000_000)
    assert len(header["errors"][0][1]) == 2_000


def test_a_step_with_the_most_calls_fits_one_message() -> None:
    """32 calls of 13 residual tensors stay within the fabric's default limits."""
    residuals = Residuals(down=(SAMPLE,) * 12, mid=SAMPLE)
    header, tensors = wire.reply_message(2**53 - 1, [residuals] * wire.MAX_CALLS)
    described = [[name, "bfloat16", [64, 1280, 128, 128], [0, 2, 3, 1]] for name in tensors]
    MessageLimits().check(
        header_bytes=len(encode_header({**header, "_tensors": described})), buffers=len(tensors), message_bytes=0
    )


BAD_OPEN_HEADERS = (
    {"op": "pickle"}, {"op": None}, {"session": -1}, {"session": True}, {"session": 2**53}, {"session": "3"},
    {"width": 0}, {"width": 10**6}, {"height": 3.5}, {"n": 0}, {"n": 10**6}, {"cfg": 1}, {"extra": 1},
)  # fmt: skip
BAD_OPEN_TENSORS = (
    {"image": torch.zeros(5, 6, 3)}, {"image": torch.zeros(5, 6, dtype=torch.uint8)},
    {"image": torch.zeros(5, 6, 4, dtype=torch.uint8)}, {"text": torch.zeros(1, 3, 4)},
    {"text": torch.zeros(2, 3, 4, dtype=torch.int64)}, {"added.other": torch.zeros(2, 3)},
    {"added.time_ids": torch.zeros(1, 6)}, {"more": torch.zeros(1)},
)  # fmt: skip
BAD_CALLS = (
    [], [[3, 1.0, 1.0]], [[3, 1.0, 1.0, True, 1]], [[3, 1.0, 1.0, 1.0]], [["3", 1.0, 1.0, True]],
    [[3, math.nan, 1.0, True]], [[3, 1.0, math.inf, True]], [[3, "1", 1.0, True]], [[3, True, 1.0, True]], "calls",
    [[3, 1.0, 1.0, True]] * 33,
)  # fmt: skip
BAD_SAMPLES = (
    torch.ones(2, 4, 2), torch.ones(2, 4, 2, 2, dtype=torch.int32), torch.ones(2, 4, 3, 2), SAMPLE.half(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("header", "tensors"),
    [
        *((_open()[0] | change, _open()[1]) for change in BAD_OPEN_HEADERS),
        *((_open()[0], _open()[1] | change) for change in BAD_OPEN_TENSORS),
        *((_step()[0] | {"calls": calls}, {f"sample.{i}": SAMPLE for i in range(len(calls))}) for calls in BAD_CALLS),
        *((_step()[0], _step()[1] | {"sample.1": sample}) for sample in BAD_SAMPLES),
        (_step()[0], {"sample.0": SAMPLE}),
    ],
)
def test_bad_requests_are_refused(header: wire.Header, tensors: wire.Tensors) -> None:
    """Every field and tensor is checked for type, shape and range; calls for their number, too."""
    with pytest.raises(WireError):
        parse_request(header, tensors)


@pytest.mark.parametrize("change", [
    {"op": "welcome"}, {"seq": -1}, {"seq": 1.0}, {"errors": []}, {"errors": [None]}, {"errors": [["a"], None]},
    {"errors": [["a", "b"], ["c", "d"]]}, {"errors": {}}, {"more": 1},
])  # fmt: skip
def test_bad_replies_are_refused(change: dict[str, object]) -> None:
    """A reply's errors and tensors must fit each other."""
    header, tensors = _reply()
    with pytest.raises(WireError):
        parse_reply(header | change, tensors)


@pytest.mark.parametrize("names", [{"1.0"}, {"1.mid", "1.1"}, {"1.mid", "0.mid"}, {"mid"}, {"1.mid", "1.x"}, set()])
def test_bad_reply_tensors_are_refused(names: set[str]) -> None:
    """A call's tensors are 0, 1, ..., mid, without gaps and for calls that worked only."""
    with pytest.raises(WireError):
        parse_reply(_reply()[0], dict.fromkeys(names, SAMPLE))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_fields = st.sampled_from(["op", "session", "width", "height", "n", "cfg", "seq", "calls", "errors", "version"])
_tensor = st.sampled_from([SAMPLE, TEXT, torch.zeros(0), torch.from_numpy(IMAGE), torch.zeros(2, 6)])
_names = st.sampled_from(["image", "text", "sample.0", "sample.1", "0.0", "0.mid", "mid", "added.time_ids", ""])


@settings(max_examples=100)
@given(
    op=st.sampled_from(["hello", "open", "step", "close", "residuals", "welcome"]) | _json,
    header=st.dictionaries(_fields, _json, max_size=8),
    tensors=st.dictionaries(_names, _tensor, max_size=4),
)
def test_whatever_arrives_is_parsed_or_refused(
    op: object, header: dict[str, object], tensors: dict[str, torch.Tensor]
) -> None:
    """No header and no tensors make a parser fail in any other way than `WireError`."""
    for parse in (parse_request, parse_reply, _parse_welcome):
        try:
            parse(header | {"op": op}, tensors)
        except WireError:
            continue
