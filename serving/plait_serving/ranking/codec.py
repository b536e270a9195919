"""Open Inference Protocol v2: a request's bytes to named arrays, outputs to the bytes of an answer. Pure functions.

Two forms, which may be mixed tensor by tensor (KServe's `inference_rest.md` and Triton's binary tensor extension)::

    JSON     {"inputs": [{"name", "shape", "datatype", "data": [...]}, ...]}           data flat or nested, row-major
    binary   JSON whose tensors carry parameters.binary_data_size instead of data, then the tensors' bytes one after the
             other, little endian; the header Inference-Header-Content-Length says where the JSON ends

Memory is allocated only for what was really sent, never for a number in a request. Every error is `BadInput`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from plait_disagg.errors import BadInput
from plait_serving import spelling

Array: TypeAlias = npt.NDArray[Any]

HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE, BINARY_OUTPUT, BINARY_DATA = "binary_data_size", "binary_data_output", "binary_data"

DTYPES: Mapping[str, np.dtype[Any]] = {
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
    "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
}  # fmt: skip
"""The datatypes that tensors of a ranking model can have."""

_BODY_FIELDS = frozenset({"id", "parameters", "inputs", "outputs", "model_name", "model_version"})
_INPUT_FIELDS = frozenset({"name", "shape", "datatype", "parameters", "data"})
_OUTPUT_FIELDS = frozenset({"name", "parameters"})
_MAX_TENSORS = 4096  # more than any model of ours has, few enough to look at one by one
_MAX_DIMENSIONS = 8
_MAX_VALUES = 2**40  # numpy refuses shapes near 2^63, even of arrays without values
_LONGEST_TEXT = 1024
_PARAMETER_TYPES = frozenset((str, int, float, bool))
_NUMBERS, _WHOLE_NUMBERS = frozenset((int, float)), frozenset((int,))
# A list is converted in pieces: within one piece no other thread of the process gets its turn.
_PIECE = 65_536


class TooLarge(BadInput):
    """The body, or its JSON part, is larger than the server reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferBody:
    """A request as it was sent. `arrays` have their declared shapes and datatypes and may be views of the body.

    `outputs`: output name to whether it is requested as binary; empty means all, in the form `binary_output`.
    """

    id: str | None
    parameters: Mapping[str, str | float | bool]
    arrays: Mapping[str, Array]
    outputs: Mapping[str, bool]
    binary_output: bool


def parse_infer(body: bytes, header_length: int | None, *, max_json_bytes: int) -> InferBody:
    """Parse a body whose first `header_length` bytes are JSON; None if all of it is. Raises `BadInput`."""
    if header_length is not None and not 0 < header_length <= len(body):
        detail = f"{header_length} is not between 1 and the body's {len(body)} bytes"
        raise BadInput(f"{HEADER_LENGTH}: {detail}", param=HEADER_LENGTH)
    end = len(body) if header_length is None else header_length
    document = _document(memoryview(body)[:end], max_json_bytes)
    parameters = _parameters(document.get("parameters"))
    with np.errstate(over="ignore"):  # a number beyond its datatype becomes infinity
        arrays = _arrays(document.get("inputs"), body, header_length)
    binary_output = _flag(parameters, BINARY_OUTPUT, "parameters", default=False)
    outputs = _outputs(document.get("outputs"), binary_output)
    check_unique(body, end, _members(document))
    return InferBody(
        id=_id(document.get("id")),
        parameters=parameters,
        arrays=arrays,
        outputs=outputs,
        binary_output=binary_output,
    )


def encode_answer(
    head: Mapping[str, Any], outputs: Sequence[tuple[str, npt.NDArray[np.float32], bool]]
) -> tuple[bytes, int | None]:
    """Return the answer's body, and the length of its JSON part if tensors follow it.

    `outputs`: name, values (contiguous), and whether they go as binary. A NaN in JSON is null.
    """
    tensors, tail = [], []
    for name, values, binary in outputs:
        tensor: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": values.shape}
        if binary:
            tensor["parameters"] = {BINARY_SIZE: values.nbytes}
            tail.append(values.astype(DTYPES["FP32"], copy=False).tobytes())
        else:
            tensor["data"] = values.reshape(-1)
        tensors.append(tensor)
    json = orjson.dumps({**head, "outputs": tensors}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join((json, *tail)), len(json)) if tail else (json, None)


def hint(name: str, known: Collection[str]) -> str:
    """Return `; did you mean NAME?` if something like `name` is known, else what is known."""
    return spelling.hint(name, known) or f"; there is: {', '.join(list(known)[:20])}"


# --- the JSON part -----------------------------------------------------------------------------------------------


def _document(json: memoryview, max_bytes: int) -> dict[str, Any]:
    if len(json) > max_bytes:
        raise TooLarge(f"the JSON is larger than {max_bytes} bytes; send large tensors as binary data")
    try:
        document = orjson.loads(json)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the body is not JSON: {error}") from error
    if type(document) is not dict:
        raise BadInput("the body must be a JSON object")
    _check_fields(document, _BODY_FIELDS, "")
    return document


def _members(document: Mapping[str, Any]) -> int:
    """Return how many members the objects of a valid document have together."""
    count = len(document) + len(document.get("parameters") or ())
    for data in chain(document["inputs"], document.get("outputs") or ()):
        count += len(data)
        if "parameters" in data:
            count += len(data["parameters"] or ())
    return count


def _check_fields(data: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    if data.keys() <= known:
        return
    for field in data:
        if field not in known:
            raise BadInput(f"{where}{field[:64]}: unknown field{hint(field, sorted(known))}", param=where + field[:64])


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    if type(value) is not list or not all(type(each) is dict for each in value):
        raise BadInput(f"{where}: must be a list of objects", param=where)
    if len(value) > _MAX_TENSORS:
        raise BadInput(f"{where}: has {len(value)} entries, more than {_MAX_TENSORS}", param=where)
    return value


def _id(value: Any) -> str | None:
    if value is None or (type(value) is str and len(value) <= _LONGEST_TEXT):
        return value
    raise BadInput(f"id: must be a string of at most {_LONGEST_TEXT} characters", param="id")


def _parameters(value: Any, owner: str = "") -> Mapping[str, str | float | bool]:
    """Check the parameters. `owner`: the tensor that has them, followed by a dot."""
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadInput(f"{owner}parameters: must be an object", param=f"{owner}parameters")
    for name, each in value.items():
        if type(each) not in _PARAMETER_TYPES:
            field = f"{owner}parameters.{name[:64]}"
            raise BadInput(f"{field}: must be a string, a number or a boolean", param=field)
    return value


def _flag(parameters: Mapping[str, Any], name: str, where: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if type(value) is not bool:
        raise BadInput(f"{where}.{name}: must be true or false", param=f"{where}.{name}")
    return value


def _name(data: Mapping[str, Any], where: str, taken: Collection[str]) -> str:
    name = data.get("name")
    if type(name) is not str or not 0 < len(name) <= _LONGEST_TEXT:
        raise BadInput(f"{where}.name: must be a string", param=f"{where}.name")
    if name in taken:
        raise BadInput(f"{name}: is there twice", param=name)
    return name


def _outputs(value: Any, binary_output: bool) -> dict[str, bool]:
    asked: dict[str, bool] = {}
    for i, data in enumerate(() if value is None else _objects(value, "outputs")):
        where = f"outputs[{i}]"
        _check_fields(data, _OUTPUT_FIELDS, where + ".")
        parameters = _parameters(data.get("parameters"), f"{where}.")
        if parameters.get("classification", 0) != 0:
            raise BadInput(f"{where}.parameters.classification: is not offered", param=where)
        name = _name(data, where, asked)
        asked[name] = _flag(parameters, BINARY_DATA, f"{where}.parameters", default=binary_output)
    return asked


# --- tensors -----------------------------------------------------------------------------------------------------


def _arrays(value: Any, body: bytes, offset: int | None) -> dict[str, Array]:
    """Read the tensors. `offset`: where the body's binary part begins; None if it has none.

    A model may have fifty tensors, so valid ones pass with few calls.
    """
    arrays: dict[str, Array] = {}
    for i, data in enumerate(_objects(value, "inputs")):
        name = data.get("name")
        if type(name) is not str or name in arrays or not 0 < len(name) <= _LONGEST_TEXT:
            name = _name(data, f"inputs[{i}]", arrays)  # says what is wrong
        if not data.keys() <= _INPUT_FIELDS:
            _check_fields(data, _INPUT_FIELDS, f"{name}.")
        shape: Any = data.get("shape")
        datatype: Any = data.get("datatype")
        count = _count(shape, name)
        if type(datatype) is not str or datatype not in DTYPES:
            raise BadInput(f"{name}: datatype must be one of {', '.join(DTYPES)}", param=name)
        parameters = data.get("parameters")
        nbytes = None if parameters is None else _parameters(parameters, name + ".").get(BINARY_SIZE)
        if (nbytes is None) == ("data" not in data):
            raise BadInput(f"{name}: must have either data or parameters.{BINARY_SIZE}", param=name)
        if nbytes is None:
            arrays[name] = array_of(data["data"], shape, datatype, name)
            continue
        if offset is None:
            raise BadInput(f"{name}: {BINARY_SIZE} needs the header {HEADER_LENGTH}", param=name)
        dtype = DTYPES[datatype]
        if type(nbytes) is not int or nbytes != count * dtype.itemsize or nbytes > len(body) - offset:
            raise _bad_size(nbytes, count * dtype.itemsize, len(body) - offset, name)
        array = np.frombuffer(body, dtype, count, offset)
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
        offset += nbytes
    if offset is not None and offset != len(body):
        raise BadInput(f"the body has {len(body) - offset} bytes more than its inputs declare", param="inputs")
    return arrays


def _count(shape: Any, name: str) -> int:
    """Return the number of values of a tensor of this shape."""
    if type(shape) is not list or not 0 < len(shape) <= _MAX_DIMENSIONS:
        raise BadInput(f"{name}: shape must be a list of 1 to {_MAX_DIMENSIONS} sizes", param=name)
    count, bound = 1, 1
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**31:
            raise BadInput(f"{name}: shape must hold whole numbers from 0 to {2**31 - 1}", param=name)
        count *= size
        bound *= size or 1
    if bound > _MAX_VALUES:
        raise BadInput(f"{name}: shape {shape} is larger than any body", param=name)
    return count


def _bad_size(declared: Any, wanted: int, left: int, name: str) -> BadInput:
    if type(declared) is not int or declared != wanted:
        detail = f"{BINARY_SIZE} must be {wanted} for its shape and datatype, not {str(declared)[:40]}"
    else:
        detail = f"needs {wanted} bytes, but the body has {left} left for it"
    return BadInput(f"{name}: {detail}", param=name)


def array_of(value: Any, shape: Sequence[int], datatype: str, name: str) -> Array:
    """Return a JSON list, flat or nested like `shape`, as an array. Raises `BadInput` naming `name`.

    numpy warns of numbers that become infinity; the caller decides whether to suppress that.
    """
    if type(value) is not list:
        raise BadInput(f"{name}: data must be a list", param=name)
    flat, dtype = _flat(value, shape, name), DTYPES[datatype]
    # By the exact type: true would pass for 1, and numpy would read numbers out of strings and nulls.
    if not set(map(type, flat)) <= (_NUMBERS if dtype.kind == "f" else _WHOLE_NUMBERS):
        raise BadInput(f"{name}: data must hold {'numbers' if dtype.kind == 'f' else 'whole numbers'} only", param=name)
    try:
        array = np.array(flat, dtype) if len(flat) <= _PIECE else _in_pieces(flat, dtype)
    except OverflowError as error:
        raise BadInput(f"{name}: a number does not fit {datatype}", param=name) from error
    return array if len(shape) == 1 else array.reshape(shape)


def _in_pieces(flat: list[Any], dtype: np.dtype[Any]) -> Array:
    array = np.empty(len(flat), dtype)
    for start in range(0, len(flat), _PIECE):
        array[start : start + _PIECE] = flat[start : start + _PIECE]
    return array


def _flat(value: list[Any], shape: Sequence[int], name: str) -> list[Any]:
    """Return the values row by row, of a list that is already flat or nested exactly like `shape`."""
    is_nested, outer = bool(value) and type(value[0]) is list, 1
    for size, inner in pairwise(shape) if is_nested else ():
        outer *= size
        # The exact lengths also bound what is made: never more than the lists that were sent.
        if len(value) != outer or not all(type(row) is list and len(row) == inner for row in value):
            raise BadInput(f"{name}: data is not nested as its shape {list(shape)} says", param=name)
        value = list(chain.from_iterable(value))
    if len(value) != math.prod(shape):
        wanted = f"its shape {list(shape)} wants {math.prod(shape)}"
        raise BadInput(f"{name}: data has {len(value)} values, {wanted}", param=name)
    return value


_DIGITS = re.compile(rb"\[[\s\d.eE+,-]*\]")
_ROWS = re.compile(rb"\[\](?:\s*,\s*\[\])+")
_MAX_NAMED_BYTES = 1 << 20
"""Of the JSON without its lists of numbers: more than the largest number of tensors needs."""
_LONGEST_NAME = 64


def check_unique(body: bytes, end: int, members: int) -> None:
    """Raise `BadInput` if the JSON in `body[:end]`, of which a parser kept so many `members`, has more of them.

    The fast parser of the hot path keeps the last of two members with one name and reports nothing. But every member
    has a colon, and counting bytes is free: as many colons as members were kept means that none was lost. Only colons
    inside of strings (an id that is a time of day) make more, and then what is no number is parsed again.
    """
    if body.count(b":", 0, end) == members:
        return
    text = _ROWS.sub(b"[]", _DIGITS.sub(b"[]", body[:end]))
    if len(text) > _MAX_NAMED_BYTES:
        raise BadInput(f"the JSON has more than {_MAX_NAMED_BYTES} bytes beside its numbers")
    try:
        json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadInput("the JSON holds numbers that are too long, or is nested too deeply") from error


def named_twice(members: list[tuple[str, Any]]) -> str:
    """Return a name that several of these members have, cut to what a message may hold."""
    counts = Counter(name for name, _ in members)
    return next(name for name, count in counts.items() if count > 1)[:_LONGEST_NAME]


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) < len(members):
        name = named_twice(members)
        raise BadInput(f"{name}: the body has it twice", param=name)
    return made
