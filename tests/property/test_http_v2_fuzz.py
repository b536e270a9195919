"""Whatever bytes arrive at infer: never a 5xx, always the protocol's form; and JSON and binary always mean the same."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fakes.ranking import FakeRanker
from plait_disagg.errors import BadInput
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.codec import DTYPES, parse_infer
from support.http_rank import HEADER, INFER, arrays, as_binary, as_json, make_client

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([-0.0, 1e308, 2**31, 2**63, 2**64, 10**40, "\x00", "FP32", "INT64", "BYTES", "item", "price"])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
tensor = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["item", "price", "genres", "genres_offsets", "person"]) | anything,
        "shape": st.lists(st.integers(0, 4), max_size=3) | anything,
        "datatype": st.sampled_from(sorted(DTYPES)) | anything,
        "data": st.lists(st.integers(-1, 30) | st.floats(), max_size=6) | anything,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 50) | anything})
        | anything,
    },
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "id": anything,
        "inputs": st.lists(tensor, max_size=4) | anything,
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["score", "x"])}), max_size=2) | anything,
        "parameters": st.fixed_dictionaries({}, optional={"deadline_ms": anything, "timeout": anything}) | anything,
    },
)

_ranker = FakeRanker()
_client = make_client(_ranker, HttpSettings())


def _check(content: bytes, headers: dict[str, str]) -> None:
    _ranker.ranked.clear()
    answer = _client.post(INFER, content=content, headers=headers)
    if answer.status_code == 200:
        assert len(_ranker.ranked) == 1
        return
    assert 400 <= answer.status_code < 500 or answer.status_code == 504, answer.text
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"]
    assert _ranker.ranked == []


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(bodies, st.binary(max_size=40), st.booleans())
def test_any_body(body, rest, binary):
    """Any values in any place, with or without bytes behind them."""
    text = json.dumps(body).encode()
    _check(text + rest * binary, {HEADER: str(len(text))} if binary else {})


@settings(max_examples=100)
@given(st.binary(max_size=200), st.none() | st.integers(-1, 220), st.booleans(), st.data())
def test_any_bytes(content, length, is_ours, data):
    """Bytes that are nothing at all, and a header that says anything of them; a body of ours that ends anywhere."""
    if is_ours:
        body, headers = as_binary(arrays(2))
        _check(body[: data.draw(st.integers(0, len(body)))], headers)
    else:
        _check(content, {} if length is None else {HEADER: str(length)})


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(arrays())), st.integers(1, 4), st.data())
def test_a_good_request_with_one_bad_tensor(name, candidates, data):
    """Everything right but one tensor, which is anything of the right or of another type: served or refused by name."""
    sent = arrays(candidates)
    dtype = data.draw(st.sampled_from([sent[name].dtype, np.dtype("i8"), np.dtype("f8"), np.dtype("u8")]))
    sent[name] = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)))
    body, headers = as_binary(sent)
    _check(body, headers)


numbers = st.one_of(
    *[
        hnp.arrays(DTYPES[name], hnp.array_shapes(max_dims=3, min_side=0, max_side=5), elements=elements)
        for name in sorted(DTYPES)
        for elements in [{"allow_nan": False, "allow_infinity": False} if DTYPES[name].kind == "f" else {}]
    ]
)


@settings(max_examples=150)
@given(numbers, st.booleans(), st.integers(0, 8))
def test_json_and_binary_are_the_same_numbers(array, nested, pad):
    """Bit for bit, for every datatype and shape, flat or nested, wherever the tensor begins."""
    text = json.dumps(as_json({"x": array}, nested=nested)).encode()
    plain = parse_infer(text, None, max_json_bytes=1 << 20).arrays["x"]
    raw, headers = as_binary({"x": array}, id="x" * pad)
    binary = parse_infer(raw, int(headers[HEADER]), max_json_bytes=1 << 20).arrays["x"]
    assert plain.shape == binary.shape == array.shape
    assert plain.dtype == binary.dtype
    assert plain.tobytes() == binary.tobytes() == array.tobytes()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), st.integers(0, 64))
def test_nothing_is_allocated_by_what_a_shape_says(shape, sent):
    """A shape is believed only if as many values were really sent."""
    inputs = [{"name": "x", "shape": shape, "datatype": "INT8", "data": [1] * sent}]
    try:
        parsed = parse_infer(json.dumps({"inputs": inputs}).encode(), None, max_json_bytes=1 << 20)
    except BadInput:
        assert math.prod(shape) != sent or math.prod(size or 1 for size in shape) > 2**40
    else:
        assert parsed.arrays["x"].size == sent == math.prod(shape)
