"""A converted model for one set of shapes: layers without factors lose their inputs."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.executors import RowFactors
from support.executors import COND, LAYERS, by_hand, small_block, small_computation, small_factors, small_inputs

pytest.importorskip("openvino", reason="needs openvino")

from openvino import opset13 as ops  # after the skip

from plait_kernels.executors.conversion import convert
from plait_kernels.executors.fixed_shapes import fixed, merge_factors
from plait_kernels.executors.openvino_core import core


@pytest.fixture(scope="module")
def converted():
    """The small module's model and layers."""
    return convert(small_computation(small_block()))


def shapes(model) -> dict[str, list[int]]:
    """Every input's fixed shape by name."""
    return {port.any_name: list(port.shape) for port in model.inputs}


def test_layers_of_rank_zero_have_no_inputs(converted):
    """Of the factors those of the one layer that has a rank are left; every shape is fixed, the outputs' too."""
    model, layers = converted
    ranks = [5 if layer.path == "point" else 0 for layer in layers]
    one = fixed(model, layers, inputs=[(3, 6, 4, 7), (3, COND)], given=3, ranks=ranks)
    wide = LAYERS["point"][0]
    assert shapes(one) == {
        "x": [3, 6, 4, 7], "condition": [3, COND], "point.A": [3, wide, 5], "point.B": [3, 5, wide],
    }  # fmt: skip
    assert [list(port.shape) for port in one.outputs] == [[3, 3, 4, 7], [3, wide, 4, 7], [3, wide, 2, 4]]


def test_without_ranks_no_factor_is_left(converted):
    """A plain call's model is the module's, without a trace of factors."""
    model, layers = converted
    one = fixed(model, layers, inputs=[(1, 6, 5, 5), (1, COND)], given=1, ranks=[0] * len(layers))
    assert set(shapes(one)) == {"x", "condition"}
    assert len(list(one.get_ops())) < len(list(model.get_ops()))


def test_the_model_it_came_from_stays_dynamic(converted):
    """It serves every other shape."""
    model, layers = converted
    fixed(model, layers, inputs=[(1, 6, 5, 5), (1, COND)], given=1, ranks=[0] * len(layers))
    assert len(model.inputs) == 2 + 2 * len(LAYERS)
    assert all(port.get_partial_shape().is_dynamic for port in model.inputs)


def test_factors_are_merged_into_the_weights_of_their_layers(converted):
    """Linear layers and convolutions: each weight gains its product, all others stay, and no input is left."""
    model, layers = converted
    one = small_factors([{path: 2 for path in LAYERS if path != "down"}])
    merged = fixed(
        model, layers, inputs=[(2, 6, 5, 4), (2, COND)], given=1, ranks=[0] * len(layers),
        merged=RowFactors(rows=2, by_path=one.by_path),
    )  # fmt: skip
    assert set(shapes(merged)) == {"x", "condition"}
    inputs = small_inputs(2, 5, 4)
    request = core().compile_model(merged, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    request.infer([value.numpy() for value in inputs])
    wanted = by_hand(small_block(), inputs, one)
    for tensor, truth in zip(request.output_tensors, wanted, strict=True):
        assert float((torch.from_numpy(tensor.data) - truth).abs().max()) < 1e-4


def test_what_is_no_layer_takes_no_factors(converted):
    """A weight that is computed, or has another width, is an error that names it: nothing is merged by guess."""
    model, layers = converted
    wrong = {"conv_out": (torch.zeros(1, 7, 2), torch.zeros(1, 2, 5))}
    with pytest.raises(ValueError, match="take no factors for"):
        fixed(
            model, layers, inputs=[(2, 6, 5, 4), (2, COND)], given=1, ranks=[0] * len(layers),
            merged=RowFactors(rows=2, by_path=wrong),
        )  # fmt: skip
    x = ops.parameter([2, 3])
    with pytest.raises(ValueError, match="are no constant"):
        merge_factors(
            ops.matmul(x, ops.parameter([3, 4]), transpose_a=False, transpose_b=False).output(0), wrong["conv_out"]
        )
    with pytest.raises(ValueError, match="is no layer"):
        merge_factors(ops.relu(x).output(0), wrong["conv_out"])
