"""Every executor under one conformance suite: what a `Computation` and `RowFactors` mean, on odd shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from plait_kernels.executors import AdaptedLayer, ExecutorError, PreparedProgram, RowFactors
from plait_kernels.executors.openvino_executor import available
from plait_kernels.executors.torch_program import TorchProgram
from support.executors import (
    LAYERS,
    SmallBlock,
    by_hand,
    openvino_at,
    small_block,
    small_computation,
    small_factors,
    small_inputs,
)

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Largest difference to float64 as a share of the largest output, by the dtype of the inputs."""

SIZES = [(1, 4, 4), (3, 5, 7), (2, 1, 9)]
EVERYWHERE = dict.fromkeys(LAYERS, 2)
MIXED = [
    {},
    {"condition": 3, "tokens.0": 1},
    {"condition": 1, "point": 5, "conv_in": 2},
    EVERYWHERE,
    {"tokens.2": 7, "down": 3},
]
"""Ranks of five rows by layer."""

Prepare = Callable[[SmallBlock], PreparedProgram]


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("openvino", marks=pytest.mark.skipif(not available(), reason="needs openvino"))],
)
def prepare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """`prepare(block)`: its program by the executor under test."""
    if request.param == "torch":
        return lambda block: TorchProgram(small_computation(block))
    executor = openvino_at(tmp_path_factory.mktemp("prepared"))
    return lambda block: executor.prepare(f"{block.conv_in.weight.dtype}", lambda: small_computation(block))


@pytest.fixture(scope="module", params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def case(request: pytest.FixtureRequest, prepare: Prepare) -> tuple[SmallBlock, PreparedProgram]:
    """A block with weights in that dtype, and its program."""
    block = small_block(request.param)
    return block, prepare(block)


def assert_close(
    found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Same shapes, `dtype`, and equal within rounding."""
    assert [one.dtype for one in found] == [dtype] * len(wanted)
    for ours, truth in zip(found, wanted, strict=True):
        assert ours.shape == truth.shape
        assert float((ours.double() - truth).abs().max()) <= CLOSE[dtype] * float(truth.abs().max())


def test_layers_that_take_factors_are_named_with_their_widths(case):
    """Linear layers and convolutions without groups, by dotted name; other layers take none."""
    wanted = {AdaptedLayer(path=path, width_in=i, width_out=o) for path, (i, o) in LAYERS.items()}
    assert set(case[1].layers) == wanted


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_shape_computes_the_module(case, size):
    """Rows and sides vary from call to call, in one program."""
    block, program = case
    inputs = small_inputs(*size)
    assert_close(program.run(inputs), by_hand(block, inputs))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_have_their_own_factors(case, rows):
    """Rows of different ranks, of other layers, and of none share a call; each gets what merging would give it."""
    block, program = case
    inputs, factors = small_inputs(rows, 5, 3), small_factors(MIXED[-rows:])
    wanted = by_hand(block, inputs, factors)
    assert_close(program.run(inputs, factors), wanted)
    assert float((wanted[0] - by_hand(block, inputs)[0]).abs().max()) > 0.05


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_may_share_their_factors(case, rows):
    """Factors with one row are those of every row."""
    block, program = case
    inputs, one = small_inputs(rows, 5, 3), small_factors([MIXED[2]])
    shared = RowFactors(rows=rows, by_path=one.by_path)
    each = small_factors([MIXED[2]] * rows)
    for path, (first, second) in one.by_path.items():
        for k in range(rows):
            each.by_path[path][0][k], each.by_path[path][1][k] = first[0], second[0]
    assert_close(program.run(inputs, shared), by_hand(block, inputs, each))


def test_calls_that_recur_give_the_same_and_leave_nothing_for_the_next(case):
    """Twice in turn; other factors of the same shapes, none, other rows, and the first again."""
    block, program = case
    inputs = small_inputs(3, 4, 4)
    first, second = small_factors(MIXED[1:4]), small_factors(MIXED[1:4], seed=9)
    calls: list[tuple[list[torch.Tensor], RowFactors | None]] = [
        (inputs, first), (inputs, second), (inputs, None), (small_inputs(1, 4, 4), None), (inputs, None),
        (inputs, first), (inputs, RowFactors(rows=3, by_path={})),
        (inputs, RowFactors(rows=3, by_path=small_factors(MIXED[2:3]).by_path)), (inputs, second),
        (small_inputs(5, 4, 4), small_factors(MIXED)), (small_inputs(1, 3, 6), small_factors([{"point": 2}])),
    ]  # fmt: skip
    for given, factors in calls:
        wanted = by_hand(block, given, factors)
        for _ in range(2):
            assert_close(program.run(given, factors), wanted)


def test_outputs_have_the_dtype_of_the_inputs(case):
    """bfloat16 in, bfloat16 out; the arithmetic between is at least as good."""
    block, program = case
    inputs = [value.bfloat16() for value in small_inputs(3, 5, 5)]
    factors = small_factors(MIXED[:3])
    assert_close(program.run(inputs, factors), by_hand(block, inputs, factors), torch.bfloat16)


def test_inputs_may_be_views_and_are_not_written(case):
    """Transposed, expanded, sliced, and made in inference mode; they and their factors are as they were."""
    block, program = case
    x, condition = small_inputs(3, 5, 7)
    with torch.inference_mode():
        given = [x.transpose(2, 3)[:, :, 1:], condition[:1].expand(3, -1)]
    factors = small_factors(MIXED[:3])
    kept = [*given, *(tensor for pair in factors.by_path.values() for tensor in pair)]
    before = [value.clone() for value in kept]
    assert_close(program.run(given, factors), by_hand(block, before[:2], factors))
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))


def test_wrong_factors_are_refused(case):
    """Factors of other rows or of a layer that takes none are an `ExecutorError`, and the program works on."""
    block, program = case
    inputs = small_inputs(3, 4, 4)
    with pytest.raises(ExecutorError, match="2 rows were given to a call of 3"):
        program.run(inputs, small_factors(MIXED[1:3]))
    foreign = RowFactors(rows=3, by_path={"grouped": (torch.zeros(3, 90, 1), torch.zeros(3, 1, 40))})
    with pytest.raises(ExecutorError, match="grouped takes no factors"):
        program.run(inputs, foreign)
    assert_close(program.run(inputs), by_hand(block, inputs))


def test_what_is_copied_stays(case):
    """Outputs of `run` are the caller's; with `copy=False` they hold until the next call at least."""
    block, program = case
    inputs, others = small_inputs(2, 4, 4), small_inputs(2, 4, 4, seed=8)
    lent = program.run(inputs, copy=False)
    assert_close(lent, by_hand(block, inputs))
    kept = program.run(inputs)
    program.run(others)
    assert_close(kept, by_hand(block, inputs))
    with torch.inference_mode():
        for output in kept:
            output.add_(1.0)
    assert_close(program.run(inputs), by_hand(block, inputs))


def test_a_computation_without_factors_takes_none(tmp_path):
    """It has no adapted layers, whatever is in it."""
    computation = small_computation(small_block(), takes_factors=False)
    programs = [TorchProgram(computation)]
    if available():
        programs.append(openvino_at(tmp_path).prepare("plain", lambda: computation))
    inputs = small_inputs(3, 5, 7)
    for program in programs:
        assert program.layers == ()
        assert_close(program.run(inputs), by_hand(small_block(), inputs))
        with pytest.raises(ExecutorError, match="takes no factors"):
            program.run(inputs, small_factors([EVERYWHERE] * 3))


def test_a_layer_that_cannot_be_widened_is_refused(tmp_path):
    """float16 weights of a layer that nobody wrote a wide form of: `ExecutorError` names it, at once."""
    block = small_block(torch.float16)
    block.conv_out = torch.nn.ConvTranspose2d(40, 3, 3, padding=1).half()
    with pytest.raises(ExecutorError, match="conv_out: a ConvTranspose2d"):
        TorchProgram(small_computation(block))
    if available():
        with pytest.raises(ExecutorError, match="conv_out: a ConvTranspose2d"):
            openvino_at(tmp_path).prepare("odd", lambda: small_computation(block))
        assert [path.name for path in tmp_path.iterdir()] == ["odd.lock"]
