"""Programs as JSON, and back. The reader treats the file as untrusted: what it returns is safe to run.

{"format": "plait.program", "version": 1,
 "inputs": [port], "constants": [port], "nodes": [node], "outputs": [[name, value name]]}
port = {"name", "shape": [-1, 13], "dtype": "float32", "rows": "user"}
node = port + {"op", "args": [...], "kwargs": {...}}
argument = null, true, 1, 1.5, "text", [argument], {"ref": name}, {"dtype": "float32"}, {"float": "inf"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any, get_args

from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.operators import SIZE, VOCABULARY, schema_of
from plait_disagg.graph.program import LOOKUP, ROWS, TILE, Arg, DType, Node, Port, Program, Ref, Rows
from plait_disagg.tables.values import Mode

VERSION = 1

_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"})
_NAME_CHARACTERS, _MAX_SIZE, _MAX_DIMENSIONS, _DEEPEST, _MAX_VALUES = 200, 2**40, 64, 4, 100_000
"""Bounds on untrusted data: far above any model, far below what would do harm. Sizes are multiplied, and Python's
integers have no largest one."""


def dump_program(program: Program) -> str:
    """Return the program as JSON text, always the same for the same program."""
    data = {
        "format": "plait.program",
        "version": VERSION,
        "inputs": [_port_to_json(port) for port in program.inputs],
        "constants": [_port_to_json(port) for port in program.constants],
        "nodes": [_node_to_json(node) for node in program.nodes],
        "outputs": [[name, ref.name] for name, ref in program.outputs],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def load_program(text: str) -> Program:
    """Parse the output of `dump_program`.

    Raises `BadProgram`, which names what is wrong, if it is not a program in which every node reads only what precedes
    it and calls an operator of the vocabulary with arguments of its schema's types.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadProgram(f"not JSON: {error}") from error
    fields = _fields(data, "program", {"format", "version", "inputs", "constants", "nodes", "outputs"})
    if fields["format"] != "plait.program" or fields["version"] != VERSION or isinstance(fields["version"], bool):
        raise BadProgram(
            f"format {fields['format']!r} version {fields['version']!r}; this reads plait.program version {VERSION}"
        )
    known: dict[str, str] = {}
    inputs = tuple(_port(part, known, "inputs") for part in _list(fields["inputs"], "inputs"))
    constants = tuple(_port(part, known, "constants") for part in _list(fields["constants"], "constants"))
    nodes = tuple(_node(part, known) for part in _list(fields["nodes"], "nodes"))
    outputs = tuple(_output(part, known) for part in _list(fields["outputs"], "outputs"))
    if len({name for name, _ in outputs}) != len(outputs):
        raise BadProgram("outputs: a name is taken twice")
    return Program(inputs=inputs, constants=constants, nodes=nodes, outputs=outputs)


def _port_to_json(port: Port | Node) -> dict[str, Any]:
    return {"name": port.name, "shape": list(port.shape), "dtype": port.dtype, "rows": port.rows}


def _node_to_json(node: Node) -> dict[str, Any]:
    kwargs = {key: _arg_to_json(value) for key, value in node.kwargs.items()}
    return {**_port_to_json(node), "op": node.op, "args": [*map(_arg_to_json, node.args)], "kwargs": kwargs}


def _arg_to_json(argument: Arg) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, DType):
        return {"dtype": argument.name}
    if isinstance(argument, tuple):
        return [_arg_to_json(part) for part in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    return argument


def _port(data: Any, known: dict[str, str], where: str) -> Port:
    described = _described(_fields(data, where, {"name", "shape", "dtype", "rows"}), known, _DTYPES)
    known[described["name"]] = described["dtype"]
    return Port(**described)


def _node(data: Any, known: dict[str, str]) -> Node:
    fields = _fields(data, "nodes", {"name", "shape", "dtype", "rows", "op", "args", "kwargs"})
    op, kwargs = fields["op"], fields["kwargs"]
    described = _described(fields, known, {"int"} if op == SIZE else _DTYPES)  # only SIZE makes a number
    name = described["name"]
    if not isinstance(op, str) or (op not in VOCABULARY and op not in (LOOKUP, TILE, SIZE)):
        raise BadProgram(f"{name}: operator {op!r} is not in the vocabulary")
    if not isinstance(kwargs, dict):
        raise BadProgram(f"{name}: kwargs is not an object")
    args = tuple(_arg(part, known, name, 0) for part in _list(fields["args"], f"{name}: args"))
    named = {str(key): _arg(value, known, name, 0) for key, value in kwargs.items()}
    node = Node(**described, op=op, args=args, kwargs=named)
    _check_call(node, known)
    known[name] = node.dtype
    return node


def _described(fields: Mapping[str, Any], known: Mapping[str, str], dtypes: Set[str]) -> dict[str, Any]:
    """Return what ports and nodes have in common, checked."""
    name, dtype, rows = fields["name"], fields["dtype"], fields["rows"]
    if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARACTERS or not name.isprintable():
        raise BadProgram(f"{str(name)[:60]!r} is not a name")
    if name in known:
        raise BadProgram(f"{name}: the name is taken twice")
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise BadProgram(f"{name}: {str(dtype)[:60]!r} is not a dtype of its values")
    if rows not in get_args(Rows):
        raise BadProgram(f"{name}: rows must be one of {', '.join(get_args(Rows))}")
    shape = _list(fields["shape"], f"{name}: shape", _MAX_DIMENSIONS)
    for place, size in enumerate(shape):
        if type(size) is not int or not (0 <= size <= _MAX_SIZE or (size == ROWS and place == 0)):
            raise BadProgram(f"{name}: shape {str(shape)[:60]} is not sizes, with {ROWS} only in front")
    return {"name": name, "shape": tuple(shape), "dtype": dtype, "rows": rows}


def _arg(data: Any, known: Mapping[str, str], where: str, depth: int) -> Arg:
    if data is None or type(data) in (bool, int, str):
        return data  # type: ignore[no-any-return]
    if type(data) is float and math.isfinite(data):
        return data
    if isinstance(data, list) and depth < _DEEPEST:
        return tuple(_arg(part, known, where, depth + 1) for part in data)
    if isinstance(data, dict) and len(data) == 1:
        kind, value = next(iter(data.items()))
        if kind == "ref" and isinstance(value, str):
            if value not in known:
                raise BadProgram(f"{where}: reads {value[:60]!r}, which nothing before it makes")
            return Ref(value)
        if kind == "dtype" and isinstance(value, str) and value in _DTYPES:
            return DType(value)
        if kind == "float" and value in ("inf", "-inf", "nan"):
            return float(value)
    raise BadProgram(f"{where}: {str(data)[:60]} is not an argument")


def _output(data: Any, known: Mapping[str, str]) -> tuple[str, Ref]:
    if not isinstance(data, list) or len(data) != 2 or not all(isinstance(part, str) for part in data):
        raise BadProgram(f"outputs: {str(data)[:60]} is not a pair of names")
    name, value = data
    if not 0 < len(name) <= _NAME_CHARACTERS or not name.isprintable() or ";" in name:  # it stands between names
        raise BadProgram(f"outputs: {name[:60]!r} is not a name")
    if known.get(value, "int") == "int":
        raise BadProgram(f"outputs: {name} is {value[:60]!r}, which is no tensor of the program")
    return name, Ref(value)


def _check_call(node: Node, known: Mapping[str, str]) -> None:
    """Raise `BadProgram` if the arguments do not fit the operator's schema."""
    if node.op == LOOKUP:
        return _check_lookup(node, known)
    if node.op == TILE:
        plain = len(node.args) == 2 and all(_is_tensor(arg, known) for arg in node.args)
        if not plain or any(key != "copy" or type(value) is not bool for key, value in node.kwargs.items()):
            raise BadProgram(f"{node.name}: {TILE} takes a tensor and user_of, and copy=true or false")
        return None
    schema = schema_of(node.op).arguments
    places = [argument for argument in schema if not argument.kwarg_only]
    named = {argument.name: argument for argument in schema if argument.kwarg_only}
    if len(node.args) > len(places) or not node.kwargs.keys() <= named.keys():
        raise BadProgram(f"{node.name}: {node.op} does not take these arguments")
    given = list(zip(places, node.args, strict=False)) + [(named[key], value) for key, value in node.kwargs.items()]
    for argument, value in given:
        if not _fits(value, str(argument.type), known):
            raise BadProgram(
                f"{node.name}: {argument.name} of {node.op} must be {argument.type}, not {str(value)[:60]}"
            )
    for argument in places[len(node.args) :]:
        if not argument.has_default_value():
            raise BadProgram(f"{node.name}: {node.op} needs {argument.name}")
    return None


def _check_lookup(node: Node, known: Mapping[str, str]) -> None:
    ids, *others = node.args if len(node.args) == 3 else (None,)
    table, mode = node.kwargs.get("table"), node.kwargs.get("mode")
    if not _is_tensor(ids, known) or not all(part is None or _is_tensor(part, known) for part in others):
        raise BadProgram(f"{node.name}: {LOOKUP} takes ids, offsets or null, and weights or null")
    if not isinstance(table, str) or mode not in get_args(Mode) or node.kwargs.keys() != {"table", "mode"}:
        raise BadProgram(f"{node.name}: {LOOKUP} needs a table's name and a mode of {', '.join(get_args(Mode))}")


def _fits(value: Arg, kind: str, known: Mapping[str, str]) -> bool:
    """Return whether `value` is allowed where a schema has `kind`."""
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[9:-1], known)
    if kind.startswith("List["):
        inner = kind[5:-1]
        # A size may stand where a list of sizes is asked.
        single = inner in ("int", "number", "float") and _fits(value, inner, known)
        return single or (isinstance(value, tuple) and all(_fits(part, inner, known) for part in value))
    if kind == "Tensor":
        return _is_tensor(value, known) or type(value) in (int, float, bool)  # torch makes a tensor of a number
    if kind == "int":
        is_number = isinstance(value, Ref) and known[value.name] == "int"
        return is_number or isinstance(value, DType) or (type(value) is int and abs(value) < 2**63)
    wanted: Mapping[str, tuple[type, ...]] = {
        "float": (int, float),
        "number": (int, float, bool),
        "bool": (bool,),
        "str": (str,),
    }
    return type(value) in wanted.get(kind, ()) or (kind not in wanted and value is None)


def _is_tensor(value: Any, known: Mapping[str, str]) -> bool:
    return isinstance(value, Ref) and known[value.name] != "int"


def _fields(data: Any, where: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict) or data.keys() != names:
        raise BadProgram(f"{where}: must be an object with exactly {', '.join(sorted(names))}")
    return data


def _list(data: Any, where: str, max_values: int = _MAX_VALUES) -> list[Any]:
    if not isinstance(data, list) or len(data) > max_values:
        raise BadProgram(f"{where}: must be a list of at most {max_values}")
    return data
