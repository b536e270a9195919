"""A call's rows divided among streams: every row gets its own answer, and what is bound is what was given last."""

from __future__ import annotations

import pytest

from plait_kernels.executors import ExecutorError, RowFactors
from support.executors import (
    LAYERS,
    CallClock,
    by_hand,
    openvino_at,
    small_block,
    small_computation,
    small_factors,
    small_inputs,
    wait_compiled,
)

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors import openvino_program  # after the skip
from plait_kernels.executors.conversion import convert
from plait_kernels.executors.fixed_shapes import fixed
from plait_kernels.executors.openvino_compiled import CompiledModel, compile_model, streams_for

RANKS = [{"point": 2}, {}, {"conv_in": 3, "down": 1}, {"tokens.0": 2}]
"""Of four rows."""


@pytest.fixture(scope="module")
def block():
    """A small module."""
    return small_block()


@pytest.mark.parametrize(
    ("rows", "threads", "streams"),
    [(1, 8, 1), (2, 1, 1), (2, 2, 2), (3, 2, 1), (8, 2, 2), (6, 3, 3), (16, 16, 4), (12, 8, 4), (2, 16, 2), (5, 5, 1)],
)
def test_streams_have_as_many_rows_and_threads(rows, threads, streams):
    """And there are only so many."""
    assert streams_for(rows, threads) == streams


@pytest.mark.parametrize("kind", ["none", "own", "shared", "merged"])
def test_rows_of_several_streams_are_those_of_one(block, tmp_path, monkeypatch, kind):
    """Without factors, with factors of their own, of one set, and merged: in models for one shape, filled up and not,
    one call after the other with other inputs."""
    divided = []

    def compile_one(*of, **how):
        divided.append(how.get("streams"))
        return compile_model(*of, **how)

    monkeypatch.setattr(openvino_program, "compile_model", compile_one)
    executor = openvino_at(tmp_path, threads=lambda: 2, clock=CallClock())
    program = executor.prepare("k", lambda: small_computation(block))

    def factors(rows: int) -> RowFactors | None:
        if kind == "none":
            return None
        if kind == "own":
            return small_factors(RANKS[:rows])
        one = small_factors([dict.fromkeys(LAYERS, 2)])
        return RowFactors(rows=rows, by_path=one.by_path, name="a" if kind == "merged" else None)

    for seed, rows in enumerate((4, 4, 4, 3, 2, 4)):
        inputs = small_inputs(rows, 5, 3, seed=seed)
        given = factors(rows)
        for got, wanted in zip(program.run(inputs, given, copy=False), by_hand(block, inputs, given), strict=True):
            assert got.shape == wanted.shape
            assert float((got - wanted).abs().max()) < 1e-4
        if seed == 1:
            wait_compiled(program, 1)
            assert divided == [None, 2]


def test_an_output_without_rows_is_not_divided(block):
    """Its parts would be laid one after the other: such a model is refused."""
    model, layers = convert(small_computation(block))
    one = fixed(model, layers, inputs=[(1, 6, 4, 4), (1, 12)], given=1, ranks=[0] * len(layers))
    with pytest.raises(ExecutorError, match="has 1 rows, not 2"):
        CompiledModel(compile_model(one, {"INFERENCE_NUM_THREADS": 2}, streams=2), (), rows=4, streams=2)
