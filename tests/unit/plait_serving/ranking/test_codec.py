"""The protocol's bytes: what is read out of them, and that whatever is wrong is said with the tensor's name."""

from __future__ import annotations

import json

import numpy as np
import orjson
import pytest

from plait_disagg.errors import BadInput
from plait_serving.ranking.codec import encode_answer, parse_infer

MIB = 1 << 20


def parse(body, header_length=None, *, largest=MIB):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_infer(raw, header_length, max_json_bytes=largest)


def tensor(**changes):
    return {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]} | changes


def one(**changes):
    return {"inputs": [{key: value for key, value in tensor(**changes).items() if value is not ...}]}


def test_binary_and_json_tensors_mix():
    """Tensor by tensor, as the extension allows."""
    head = {"inputs": [tensor(name="a"), tensor(name="b", parameters={"binary_data_size": 16})]}
    del head["inputs"][1]["data"]
    text = json.dumps(head).encode()
    body = parse(text + np.array([3, 4], "<i8").tobytes(), len(text))
    assert body.arrays["a"].tolist() == [1, 2]
    assert body.arrays["b"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ([], None, "object"),
        ({}, "inputs", "list"),
        ({"inputs": [1]}, "inputs", "list of objects"),
        ({"inputs": [], "ouputs": []}, "ouputs", "did you mean outputs"),
        ({"inputs": [], "id": "x" * 2000}, "id", "string"),
        ({"inputs": [], "parameters": {"a": {}}}, "parameters.a", "string, a number"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output", "true or false"),
        ({"inputs": [], "outputs": [{"name": "s"}, {"name": "s"}]}, "s", "twice"),
        ({"inputs": [], "outputs": [{"name": "s", "parameters": {"classification": 2}}]}, "outputs[0]", "not offered"),
        ({"inputs": [tensor(), tensor()]}, "x", "twice"),
        ({"inputs": [tensor()] * 5000}, "inputs", "more than"),
        (one(dtype="FP32"), "x.dtype", "did you mean datatype"),
        (one(shape=[]), "x", "shape"),
        (one(shape=[-1]), "x", "shape"),
        (one(shape=[0, 2**31 - 1, 2**31 - 1]), "x", "larger than any body"),
        (one(shape=[10**7]), "x", "2 values"),
        (one(datatype="BYTES"), "x", "datatype"),
        (one(data=...), "x", "either data or"),
        (one(data=..., parameters={"binary_data_size": 16}), "x", "header"),
        (one(data="12"), "x", "list"),
        (one(data=[1, True]), "x", "whole numbers"),
        (one(data=[1, 2**63]), "x", "does not fit INT64"),
        (one(data=[None, 1.0], datatype="FP32"), "x", "numbers only"),
        (one(shape=[2, 2], data=[[1, 2], [3]]), "x", "nested"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body, param, says):
    """Every fault is a BadInput with the field's name and a reason."""
    with pytest.raises(BadInput) as caught:
        parse(body)
    assert caught.value.param == param
    assert says in caught.value.message


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b'{"inputs": [NaN]}', b"[" * 100_000, b'"\\ud800"'])
def test_what_is_no_json_is_said(raw):
    """Cut off, not UTF-8, NaN, nested without end, lone surrogates."""
    with pytest.raises(BadInput):
        parse(raw)


@pytest.mark.parametrize(
    ("size", "sent", "says"),
    [
        (16, 15, "15 left"),
        (16, 17, "1 bytes more"),
        (15, 16, "must be 16"),
        (16.0, 16, "must be 16"),
        (True, 16, "must be 16"),
        (10**30, 16, "must be 16"),
    ],
)
def test_binary_sizes_must_agree_with_the_shape_and_the_body(size, sent, says):
    """Neither too short nor too long, whatever the declaration says."""
    text = json.dumps(one(data=..., parameters={"binary_data_size": size})).encode()
    with pytest.raises(BadInput, match=says):
        parse(text + bytes(sent), len(text))


def test_an_answer_is_json_with_flat_data():
    """Names, shapes, datatypes; a NaN is null, so that the body stays JSON."""
    values = np.array([[0.1, np.nan], [3e38, -1]], np.float32)
    body, length = encode_answer({"model_name": "m"}, [("s", values, False)])
    assert length is None
    tensor = {"name": "s", "datatype": "FP32", "shape": [2, 2], "data": [0.1, None, 3e38, -1.0]}
    assert orjson.loads(body) == {"model_name": "m", "outputs": [tensor]}


ONE = '"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}]'


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"id": "a", "id": "b", ONE}', "id"),
        ('{ONE, ONE}', "inputs"),
        ('{"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [9, 9], "data": [1, 2]}]}', "data"),
        ('{"parameters": {"deadline_ms": 5, "deadline_ms": 50}, ONE}', "deadline_ms"),
        ('{"i\\u0064": "a", "id": "b", ONE}', "id"),
        # One colon is lost with the member, another is gained by an escape.
        ('{"id": "a", "id": "\\u003a", ONE}', "id"),
        ('{"id": "a", ONE, "outputs": [{"name": "y", "name": "z"}]}', "name"),
    ],
)  # fmt: skip
def test_what_is_said_twice_is_refused_by_its_name(body, name):
    """The parser keeps the last and says nothing (finding 12)."""
    with pytest.raises(BadInput, match="the body has it twice") as caught:
        parse(body.replace("ONE", ONE).encode())
    assert caught.value.param == name


@pytest.mark.parametrize("text", ['a":b', '\\":', '{"id":1,"id":2}', "\\u003a"])
def test_colons_inside_of_strings_are_no_members(text):
    """Only members count."""
    body = {"id": text, "parameters": {f"{text}:{n}": text for n in range(3)}, **one(name=f"x{text}")}
    for spelled in (json.dumps(body), json.dumps(body, indent=1, separators=(" , ", " : "))):
        assert parse(spelled.encode()).id == text


def test_duplicates_in_a_large_body_are_found_without_parsing_its_numbers_again():
    """However they are nested; what is no number is bounded (finding 12)."""
    many = one(shape=[360_000], data=[7] * 360_000)
    text = json.dumps({"id": "a:b", **many})
    assert parse(text.encode(), largest=8 * MIB).id == "a:b"
    rows = json.dumps({"id": "a:b", **one(shape=[140_000, 2], data=[[7, 8]] * 140_000)})
    assert parse(rows.encode(), largest=8 * MIB).id == "a:b"
    with pytest.raises(BadInput, match="the body has it twice") as caught:
        parse(text.replace('"id"', '"id": "c", "id"', 1).encode(), largest=8 * MIB)
    assert caught.value.param == "id"
    strange = {"parameters": {f"{n}:": n for n in range(100_000)}, **one()}
    with pytest.raises(BadInput, match="beside its numbers"):
        parse(json.dumps(strange).encode(), largest=8 * MIB)


def test_the_binary_part_holds_no_members():
    """Whatever its bytes are."""
    head = {"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}]}
    text = json.dumps(head).encode()
    assert parse(text + b'"id":1,"id":2.  ', len(text)).arrays["x"].shape == (2,)
