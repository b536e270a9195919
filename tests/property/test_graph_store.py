"""Stored programs: what is written is read back; what is not a program is refused, whatever it is."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait_disagg.graph.costs import cut_problem
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.edit import reads
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.operators import VOCABULARY, overload, schema_of
from plait_disagg.graph.split import split
from plait_disagg.graph.store import dump_program, load_program
from plait_disagg.graph.tile import tile
from support.graph import model

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ref", "dtype", "name", "op"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ["small", "zoo", "din"])
def test_programs_are_read_back_as_they_were(name):
    """JSON keeps every argument: captured, tiled and cut programs compare equal after a round trip."""
    program = model(name)[1].program
    tiled = tile(program)
    problem = cut_problem(tiled, dict.fromkeys(reads(tiled), 1e-5), candidates=1, ids_per_bag={})
    halves = split(tiled, CUTTERS["prism"](problem))
    for one in (program, tiled, tile(program, exact=True), halves.cn, halves.hn):
        assert load_program(dump_program(one)) == one


def places(data, path=()):
    """Every place in plain data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


@cache
def _original():
    return json.loads(dump_program(tile(model("small")[1].program)))


def small_program():
    """One's own copy."""
    return copy.deepcopy(_original())


# Deferred: a capture takes a second that those who only collect tests need not wait.
some_place = st.deferred(lambda: st.sampled_from([path for path in places(_original()) if path]))


@settings(max_examples=200)
@given(some_place, json_values)
def test_a_damaged_program_is_refused_or_still_a_program(path, value):
    """One place replaced by anything: `BadProgram`, or a program in which every node reads what stands before it."""
    data = small_program()
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    try:
        program = load_program(json.dumps(data))
    except BadProgram:
        return
    known = {port.name for port in (*program.inputs, *program.constants)}
    for node in program.nodes:
        assert set(node.inputs) <= known
        assert node.op in VOCABULARY or node.op.startswith("plait.") or node.op == "aten.sym_size.int"
        known.add(node.name)


@settings(max_examples=100)
@given(json_values | st.text(max_size=40))
@example("[" * 100_000)
def test_garbage_is_refused(value):
    """What is not a program at all raises `BadProgram` and nothing else."""
    with pytest.raises(BadProgram):
        load_program(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda node: node.update(op="aten.sort.stable"), "vocabulary"),
        (lambda node: node.update(args=[{"ref": "later"}]), "nothing before it makes"),
        (lambda node: node.update(args=[]), "needs"),
        (lambda node: node.update(args=[*node["args"], 1, 2, 3, 4, 5]), "does not take"),
        (lambda node: node.update(args=["text", *node["args"][1:]]), "must be Tensor"),
        (lambda node: node.update(kwargs={"out": None}), "does not take"),
        (lambda node: node.update(shape=[3, -1]), "only in front"),
        (lambda node: node.update(shape=[2**60]), "shape"),
        (lambda node: node.update(shape=[2**40] * 65), "shape: must be a list of at most 64"),
        (lambda node: node.update(dtype="complex64"), "not a dtype"),
        (lambda node: node.update(rows="many"), "rows must be"),
    ],
)
def test_what_is_wrong_with_a_node_is_said(change, text):
    """The message names the node's fault."""
    data = small_program()
    change(next(node for node in data["nodes"] if node["op"] == "aten.linear.default"))
    with pytest.raises(BadProgram, match=text):
        load_program(json.dumps(data))


def test_every_word_of_the_vocabulary_exists_and_changes_nothing_in_place():
    """The vocabulary names overloads of this torch, none of which writes to its operands or is random."""
    for name in VOCABULARY:
        assert callable(overload(name))
        assert not schema_of(name).is_mutable, name
    with pytest.raises(KeyError):
        overload("aten.add_.Tensor")
