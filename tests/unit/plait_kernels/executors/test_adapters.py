"""Which layers take factors, and which factors a call takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait_kernels.executors.adapters import Twin, adapted_layer, flat_factors
from support.executors import small_block, small_computation


@pytest.mark.parametrize(
    ("module", "widths"),
    [
        (nn.Linear(2, 3), (2, 3)),
        (nn.Conv2d(2, 3, 1), (2, 3)),
        (nn.Conv2d(2, 3, 3, padding=1), (18, 3)),
        (nn.Conv2d(2, 3, (1, 2), stride=2), (4, 3)),
        (nn.Conv2d(2, 4, 1, groups=2), None),
        (nn.Conv2d(2, 3, 3, dilation=2), None),
        (nn.Conv2d(2, 3, 3, padding="same"), None),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), None),
        (nn.LayerNorm(2), None),
    ],
    ids=str,
)
def test_linear_layers_and_plain_convolutions_are_adapted(module, widths):
    """Nothing else; a convolution's width is that of its windows."""
    layer = adapted_layer("it", module)
    assert (layer and (layer.width_in, layer.width_out)) == widths


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_twin_shares_the_parameters_and_leaves_the_module_alone(dtype):
    """No parameter is copied, the module computes what it did, and what is written into it is seen by the twin."""
    block = small_block(dtype)
    children = list(map(id, block.modules()))
    twin = Twin(small_computation(block))
    assert {p.data_ptr() for p in twin.parameters()} == {p.data_ptr() for p in block.parameters()}
    assert list(map(id, block.modules())) == children
    example = small_computation(block).example
    none = flat_factors(twin.layers, None)
    before = twin(*example, *none)[0]
    block.point.weight.mul_(2)
    assert not torch.equal(twin(*example, *none)[0], before)
