"""Which layers take factors, and which factors a call takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait_kernels.executors import AdaptedLayer, Computation, ExecutorError, InputSpec, RowFactors
from plait_kernels.executors.adapters import Twin, adapted_layer, check_factors, flat_factors
from support.executors import small_block, small_computation

LAYERS = [AdaptedLayer(path="a", width_in=2, width_out=3), AdaptedLayer(path="b", width_in=4, width_out=5)]


def factors(rows: int, *paths: str) -> RowFactors:
    """Zeros of rank 1."""
    return RowFactors(rows=rows, by_path={path: (torch.zeros(rows, 2, 1), torch.zeros(rows, 1, 3)) for path in paths})


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


def test_factors_are_checked_before_they_are_used():
    """None, some and all of the layers pass; other rows and other layers are named."""
    for good in (None, factors(2), factors(2, "a"), factors(2, "b", "a")):
        check_factors(LAYERS, 2, good)
    with pytest.raises(ExecutorError, match="factors for 2 rows were given to a call of 3"):
        check_factors(LAYERS, 3, factors(2, "a"))
    with pytest.raises(ExecutorError, match="c takes no factors"):
        check_factors(LAYERS, 2, factors(2, "a", "c"))
    with pytest.raises(ExecutorError, match="a takes no factors"):
        check_factors([], 2, factors(2, "a"))


def test_a_layer_without_factors_gets_rank_zero():
    """The flat list has A and B of every layer in order."""
    flat = flat_factors(LAYERS, factors(3, "a"))
    assert [tuple(one.shape) for one in flat] == [(3, 2, 1), (3, 1, 3), (3, 4, 0), (3, 0, 5)]
    assert [tuple(one.shape) for one in flat_factors(LAYERS, None)] == [(1, 2, 0), (1, 0, 3), (1, 4, 0), (1, 0, 5)]


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 2, 0), (3, 1, 1), (3, 2, 0), (3, 2, 1), ((3, 1), 1, (1, 0)), (5, 3, 2)],
)
def test_a_convolution_adds_its_windows_times_its_factors(kernel, stride, padding):
    """Every kernel, stride and padding, on odd sides, row by row; rank 0 adds nothing."""
    layer, x = nn.Conv2d(4, 5, kernel, stride, padding), torch.randn(3, 4, 9, 8)
    computation = Computation(
        module=_Alone(layer),
        inputs=(InputSpec(name="x", shape=(None, 4, None, None)),),
        example=(x,),
        takes_factors=True,
    )
    windows = nn.functional.unfold(x, layer.kernel_size, 1, layer.padding, layer.stride).transpose(1, 2)
    for rank in (2, 0):
        first, second = torch.randn(3, windows.shape[2], rank), torch.randn(3, rank, 5)
        with torch.no_grad():
            added = (windows @ first @ second).transpose(1, 2).reshape(layer(x).shape)
            (found,) = Twin(computation)(x, first, second)
            assert torch.allclose(found, layer(x) + added, rtol=1e-5, atol=1e-4)


class _Alone(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.layer(x),)


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
