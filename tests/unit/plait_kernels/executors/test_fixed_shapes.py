"""A converted model for one set of shapes: layers without factors lose their inputs."""

from __future__ import annotations

import pytest

from support.executors import COND, LAYERS, small_block, small_computation

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors.conversion import convert  # after the skip
from plait_kernels.executors.fixed_shapes import fixed


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
