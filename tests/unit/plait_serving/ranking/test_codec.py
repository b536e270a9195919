"""The protocol's bytes: what is read out of them, and that whatever is wrong is said with the tensor's name."""

from __future__ import annotations

import json

import numpy as np
import orjson
import pytest

from plait_disagg.errors import BadInput
from plait_serving.ranking.codec import DTYPES, TooLarge, encode_answer, parse_infer
from support.http_rank import arrays, as_binary, as_json

MIB = 1 << 20


def parse(body, header_length=None, *, largest=MIB):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_infer(raw, header_length, max_json_bytes=largest)


def tensor(**changes):
    return {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]} | changes


def one(**changes):
    return {"inputs": [{key: value for key, value in tensor(**changes).items() if value is not ...}]}


@pytest.mark.parametrize("nested", [False, True])
def test_json_tensors_are_read_flat_and_nested(nested):
    """Both spellings of data give the arrays that were sent, in their shapes and datatypes."""
    sent = arrays(5)
    body = parse(as_json(sent, nested=nested, id="7", parameters={"deadline_ms": 20}))
    assert (body.id, body.parameters, body.outputs) == ("7", {"deadline_ms": 20}, {})
    assert list(body.arrays) == list(sent)
    for name, array in sent.items():
        assert body.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(body.arrays[name], array)


def test_binary_tensors_are_read_at_any_alignment():
    """The JSON part may have any length, so tensors begin anywhere."""
    sent = arrays(5)
    for pad in range(9):
        raw, headers = as_binary(sent, id="x" * pad)
        body = parse(raw, int(next(iter(headers.values()))))
        for name, array in sent.items():
            np.testing.assert_array_equal(body.arrays[name], array)


def test_binary_and_json_tensors_mix():
    """Tensor by tensor, as the extension allows."""
    head = {"inputs": [tensor(name="a"), tensor(name="b", parameters={"binary_data_size": 16})]}
    del head["inputs"][1]["data"]
    text = json.dumps(head).encode()
    body = parse(text + np.array([3, 4], "<i8").tobytes(), len(text))
    assert body.arrays["a"].tolist() == [1, 2]
    assert body.arrays["b"].tolist() == [3, 4]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_datatype_is_read_in_both_forms(name):
    """Extremes of each type come through unchanged."""
    dtype = DTYPES[name]
    info = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    values = np.array([info.min, 0, 1, info.max], dtype)
    as_list = one(shape=[4], datatype=name, data=values.tolist())
    np.testing.assert_array_equal(parse(as_list).arrays["x"], values)
    text = json.dumps(one(shape=[4], datatype=name, data=..., parameters={"binary_data_size": values.nbytes})).encode()
    np.testing.assert_array_equal(parse(text + values.tobytes(), len(text)).arrays["x"], values)


def test_empty_tensors_are_tensors():
    """No ids at all is a legal bag."""
    for data, shape in (([], [0]), ([], [0, 3]), ([[], []], [2, 0])):
        assert parse(one(shape=shape, data=data)).arrays["x"].shape == tuple(shape)
    text = json.dumps(one(shape=[0], data=..., parameters={"binary_data_size": 0})).encode()
    assert parse(text, len(text)).arrays["x"].shape == (0,)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ([], None, "object"),
        ({}, "inputs", "list"),
        ({"inputs": {}}, "inputs", "list"),
        ({"inputs": [1]}, "inputs", "list of objects"),
        ({"inputs": [], "ouputs": []}, "ouputs", "did you mean outputs"),
        ({"inputs": [], "id": 5}, "id", "string"),
        ({"inputs": [], "id": "x" * 2000}, "id", "string"),
        ({"inputs": [], "parameters": []}, "parameters", "object"),
        ({"inputs": [], "parameters": {"a": {}}}, "parameters.a", "string, a number"),
        ({"inputs": [], "parameters": {"binary_data_output": 1}}, "parameters.binary_data_output", "true or false"),
        ({"inputs": [], "outputs": 3}, "outputs", "list"),
        ({"inputs": [], "outputs": [{"name": 3}]}, "outputs[0].name", "string"),
        ({"inputs": [], "outputs": [{"name": "s"}, {"name": "s"}]}, "s", "twice"),
        ({"inputs": [], "outputs": [{"name": "s", "parameters": {"classification": 2}}]}, "outputs[0]", "not offered"),
        ({"inputs": [{"name": ""}]}, "inputs[0].name", "string"),
        ({"inputs": [tensor(), tensor()]}, "x", "twice"),
        ({"inputs": [tensor()] * 5000}, "inputs", "more than"),
        (one(dtype="FP32"), "x.dtype", "did you mean datatype"),
        (one(shape=...), "x", "shape"),
        (one(shape=[]), "x", "shape"),
        (one(shape=2), "x", "shape"),
        (one(shape=[-1]), "x", "shape"),
        (one(shape=[2.0]), "x", "shape"),
        (one(shape=[True]), "x", "shape"),
        (one(shape=[1] * 9), "x", "shape"),
        (one(shape=[0, 2**31 - 1, 2**31 - 1]), "x", "larger than any body"),
        (one(shape=[10**7]), "x", "2 values"),
        (one(shape=[10**30]), "x", "shape"),
        (one(datatype=...), "x", "datatype"),
        (one(datatype="BYTES"), "x", "datatype"),
        (one(datatype=["INT64"]), "x", "datatype"),
        (one(data=...), "x", "either data or"),
        (one(parameters={"binary_data_size": 16}), "x", "either data or"),
        (one(data=..., parameters={"binary_data_size": 16}), "x", "header"),
        (one(data="12"), "x", "list"),
        (one(data=[1]), "x", "1 values"),
        (one(data=[1, 2.0]), "x", "whole numbers"),
        (one(data=[1, "2"]), "x", "whole numbers"),
        (one(data=[1, None]), "x", "whole numbers"),
        (one(data=[1, True]), "x", "whole numbers"),
        (one(data=[1, [2]]), "x", "whole numbers"),
        (one(data=[1, 2**63]), "x", "does not fit INT64"),
        (one(data=[1, 256], datatype="UINT8"), "x", "does not fit UINT8"),
        (one(data=[1, -1], datatype="UINT64"), "x", "does not fit UINT64"),
        (one(data=["1", "2"], datatype="FP32"), "x", "numbers only"),
        (one(data=[None, 1.0], datatype="FP32"), "x", "numbers only"),
        (one(data=[[1, 2]]), "x", "1 values"),
        (one(shape=[2, 2], data=[[1, 2], [3]]), "x", "nested"),
        (one(shape=[2, 2], data=[[1, 2], 3]), "x", "nested"),
        (one(shape=[2, 2], data=[[[1], [2]], [[3], [4]]]), "x", "whole numbers"),
        (one(shape=[2, 2, 1], data=[[1, 2], [3, 4]]), "x", "nested"),
        (one(shape=[2, 2], data=[1, 2, [3, 4], 5]), "x", "whole numbers"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body, param, says):
    """Every fault is a BadInput with the field's name and a reason."""
    with pytest.raises(BadInput) as caught:
        parse(body)
    assert caught.value.param == param
    assert says in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"nope", b"\xff\xfe", b'{"inputs": [NaN]}', b"[" * 100_000, b'"\\ud800"'])
def test_what_is_no_json_is_said(raw):
    """Cut off, not UTF-8, NaN, nested without end, lone surrogates."""
    with pytest.raises(BadInput):
        parse(raw)


@pytest.mark.parametrize(
    ("size", "sent", "says"),
    [
        (16, 15, "15 left"),
        (16, 17, "1 bytes more"),
        (16, 0, "0 left"),
        (15, 16, "must be 16"),
        (24, 24, "must be 16"),
        (-16, 16, "must be 16"),
        (16.0, 16, "must be 16"),
        ("16", 16, "must be 16"),
        (True, 16, "must be 16"),
        (10**30, 16, "must be 16"),
    ],
)
def test_binary_sizes_must_agree_with_the_shape_and_the_body(size, sent, says):
    """Neither too short nor too long, whatever the declaration says."""
    text = json.dumps(one(data=..., parameters={"binary_data_size": size})).encode()
    with pytest.raises(BadInput, match=says):
        parse(text + bytes(sent), len(text))


def test_the_second_of_two_binary_tensors_gets_what_the_first_leaves():
    """Declarations cannot overlap: tensors lie one after the other."""
    inputs = [one(name=name, data=..., parameters={"binary_data_size": 16})["inputs"][0] for name in ("a", "b")]
    text = json.dumps({"inputs": inputs}).encode()
    with pytest.raises(BadInput) as caught:
        parse(text + bytes(20), len(text))
    assert (caught.value.param, "4 left" in caught.value.message) == ("b", True)


@pytest.mark.parametrize("length", [0, -1, 1000])
def test_a_header_length_outside_the_body_is_refused(length):
    """The raw form (0) is not offered; beyond the body there is nothing."""
    with pytest.raises(BadInput, match="inference-header-content-length"):
        parse(json.dumps(one()).encode(), length)


def test_the_json_part_is_bounded_but_the_tensors_are_not():
    """A long list of numbers is told to come as binary; binary tensors of that size pass."""
    numbers = np.arange(1000)
    with pytest.raises(TooLarge, match="binary"):
        parse(one(shape=[1000], data=numbers.tolist()), largest=1000)
    raw, headers = as_binary({"x": numbers})
    assert len(parse(raw, int(next(iter(headers.values()))), largest=1000).arrays["x"]) == 1000


def test_outputs_say_which_and_in_which_form():
    """binary_data of an output wins over binary_data_output of the request."""
    asked = {"outputs": [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}]}
    body = parse(one() | asked | {"parameters": {"binary_data_output": True}})
    assert (body.outputs, body.binary_output) == ({"a": True, "b": False}, True)


def test_an_answer_is_json_with_flat_data():
    """Names, shapes, datatypes; a NaN is null, so that the body stays JSON."""
    values = np.array([[0.1, np.nan], [3e38, -1]], np.float32)
    body, length = encode_answer({"model_name": "m"}, [("s", values, False)])
    assert length is None
    tensor = {"name": "s", "datatype": "FP32", "shape": [2, 2], "data": [0.1, None, 3e38, -1.0]}
    assert orjson.loads(body) == {"model_name": "m", "outputs": [tensor]}


def test_an_answer_in_binary_has_its_tensors_behind_the_json():
    """In the order of the outputs, with their sizes; a JSON output may stand between them."""
    a, b, c = (np.arange(n, dtype=np.float32) for n in (2, 3, 4))
    body, length = encode_answer({"id": "i"}, [("a", a, True), ("b", b, False), ("c", c, True)])
    tensors = orjson.loads(body[:length])["outputs"]
    assert [t.get("parameters", {}).get("binary_data_size") for t in tensors] == [8, None, 16]
    assert tensors[1]["data"] == [0.0, 1.0, 2.0]
    assert body[length:] == a.tobytes() + c.tobytes()


ONE = '"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}]'


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"id": "a", "id": "b", ONE}', "id"),
        ('{"id": "12:30", "id": "12:31", ONE}', "id"),
        ('{ONE, ONE}', "inputs"),
        ('{"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [9, 9], "data": [1, 2]}]}', "data"),
        ('{"parameters": {"deadline_ms": 5, "deadline_ms": 50}, ONE}', "deadline_ms"),
        ('{"parameters": {"a:b": 5, "a:b": 50}, ONE}', "a:b"),
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


@pytest.mark.parametrize("text", ["a:b", 'a":b', '\\":', ":", '{"id":1,"id":2}', "\\u003a"])
def test_colons_inside_of_strings_are_no_members(text):
    """Only members count."""
    body = {"id": text, "parameters": {f"{text}:{n}": text for n in range(3)}, **one(name=f"x{text}")}
    for spelled in (json.dumps(body), json.dumps(body, indent=1, separators=(" , ", " : "))):
        assert parse(spelled.encode()).id == text


def test_duplicates_in_a_large_body_are_found_without_parsing_it_again():
    """The name too, as long as it is not hidden among as many others (finding 12)."""
    many = one(shape=[500_000], data=[7] * 500_000)
    text = json.dumps({"id": "a:b", **many})
    assert parse(text.encode(), largest=8 * MIB).id == "a:b"
    with pytest.raises(BadInput, match="the body has it twice") as caught:
        parse(text.replace('"id"', '"id": "c", "id"', 1).encode(), largest=8 * MIB)
    assert caught.value.param == "id"
    strange = {"parameters": {f"{n}:": n for n in range(60_000)}, **one()}
    with pytest.raises(BadInput, match="more than 50000 strings"):
        parse(json.dumps(strange).encode(), largest=8 * MIB)


def test_the_binary_part_holds_no_members():
    """Whatever its bytes are."""
    head = {"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}]}
    text = json.dumps(head).encode()
    assert parse(text + b'"id":1,"id":2.  ', len(text)).arrays["x"].shape == (2,)
