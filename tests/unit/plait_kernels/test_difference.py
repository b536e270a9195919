"""Operators without a GPU form, by difference: each form against fp64 on whatever hypothesis thinks of.

The others have theirs beside their tests, with Triton's interpreter among the forms.
"""

from __future__ import annotations

import math
import pkgutil

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from plait_kernels.executors import Computation
from plait_kernels.executors.adapters import Twin
from plait_kernels.lora_merge import Term
from plait_kernels.registry import IMPLS
from suites.operators import ROUNDING, fuzz

torch.set_num_threads(1)

MERGES = {impl.name: pkgutil.resolve_name(impl.entry) for impl in IMPLS if impl.op == "lora_merge"}
LOOKUPS = {impl.name: pkgutil.resolve_name(impl.entry) for impl in IMPLS if impl.op == "int8_lookup"}
SIDES = st.integers(0, 9)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers in fp32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gapped(value: torch.Tensor) -> torch.Tensor:
    """The same values, with a poisoned neighbour behind each."""
    wide = value.new_full((*value.shape, 2), math.nan)
    wide[..., 0] = value
    return wide[..., 0]


@fuzz
@given(
    st.tuples(SIDES, SIDES) | st.tuples(SIDES, SIDES, st.integers(1, 3), st.integers(1, 3)),
    st.lists(st.tuples(st.integers(0, 5), st.floats(-2, 2)), max_size=3),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
)
def test_merges_do_not_differ(shape, ranks, dtype, has_gaps):
    """Any shape, rank 0, no term, nothing at all, weights and factors with gaps: one rounding from fp64. Address and
    strides stay: compiled graphs and other holders of the tensor see the merge. The pristine weight stays, too."""
    width = math.prod(shape[1:])
    lay = gapped if has_gaps else torch.Tensor.contiguous
    terms = [
        Term(up=lay(drawn(2 * i, shape[0], rank)), down=lay(drawn(2 * i + 1, rank, width)), c=c)
        for i, (rank, c) in enumerate(ranks)
    ]
    pristine = lay(drawn(99, *shape).to(dtype))
    products = [term.c * (term.up.double() @ term.down.double()) for term in terms]
    wanted = pristine.double() + sum(products, torch.zeros(shape[0], width, dtype=torch.float64)).reshape(shape)
    scale = max([1.0, *(float(one.abs().max()) for one in (wanted, *products) if one.numel())])
    kept = pristine.clone()
    for name, op in MERGES.items():
        weight = lay(torch.full(shape, math.nan, dtype=dtype))
        place = weight.data_ptr(), weight.stride()
        op(weight, pristine, terms)
        assert (weight.data_ptr(), weight.stride()) == place
        assert torch.equal(pristine, kept)
        if weight.numel():
            assert float((weight.double() - wanted).abs().max()) <= 2 * ROUNDING[dtype] * scale, name


@fuzz
@given(
    st.integers(1, 40), st.integers(1, 140), st.lists(st.integers(0, 90), max_size=6), st.booleans(), st.integers(0, 99)
)
def test_lookups_do_not_differ(rows, width, sizes, weighted, seed):
    """Any width, bags of any size, none: 16 u of the largest magnitude that a row may have, for all ids."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.ops.quantized.embedding_bag_byte_prepack(drawn(seed, rows, width) * 10)
    ids = torch.randint(rows, (sum(sizes),), generator=generator)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    weights = drawn(seed + 1, sum(sizes)) if weighted else None
    floats = torch.ops.quantized.embedding_bag_byte_unpack(table).double()[ids]
    floats = floats if weights is None else floats * weights.double()[:, None]
    wanted = torch.stack([part.sum(0) for part in floats.split(sizes)]) if sizes else floats.new_zeros(0, width)
    used = torch.ones(len(ids)) if weights is None else weights
    bound = 2.0**-20 * 50 * (1 + float(used.abs().sum()))  # no value is beyond 50
    for name, op in LOOKUPS.items():
        found = op(table, ids, offsets, weights)
        assert (found.shape, found.dtype) == (wanted.shape, torch.float32)
        assert not found.numel() or float((found.double() - wanted).abs().max()) <= bound, name


LAYERS = st.sampled_from(
    [
        (nn.Linear(5, 3), (5,)), (nn.Linear(4, 7, bias=False), (6, 4)), (nn.Conv2d(3, 5, 1), (3, 4, 5)),
        (nn.Conv2d(2, 3, 3, padding=1), (2, 5, 4)), (nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 7, 6)),
        (nn.Conv2d(3, 2, (1, 2), stride=(2, 1)), (3, 5, 5)), (nn.Conv2d(2, 3, 1, padding=1), (2, 5, 4)),
        (nn.Conv2d(2, 3, (3, 1), padding=(1, 0)), (2, 6, 5)), (nn.Conv2d(2, 3, 5, stride=3, padding=2), (2, 9, 8)),
    ]
)  # fmt: skip


@fuzz
@given(LAYERS, st.integers(1, 4), st.integers(0, 5), st.booleans(), st.booleans())
def test_row_wise_layers_do_not_differ(layer, rows, rank, is_shared, has_gaps):
    """Factors by row or the same for all, of rank 0 too: eager, traced (what other executors convert), and fp64."""
    module, shape = layer
    twin = Twin(Computation(module=Alone(module), inputs=(), example=(), takes_factors=True))
    (own,) = twin.layers
    given_rows = 1 if is_shared else rows
    x = drawn(0, rows, *shape)
    x = gapped(x) if has_gaps else x
    first, second = drawn(1, given_rows, own.width_in, rank), drawn(2, given_rows, rank, own.width_out)
    wanted = formula(module, x, first.expand(rows, -1, -1), second.expand(rows, -1, -1))
    with torch.inference_mode(mode=False), torch.no_grad():
        eager = twin(x, first, second)[0]
        traced = torch.jit.trace(lambda *a: twin(*a)[0], (x, first, second), check_trace=False)
        for found in (eager, traced(x, first, second)):
            assert found.shape == wanted.shape
            assert float((found.double() - wanted).abs().max()) <= 1e-5 * max(1.0, float(wanted.abs().max()))


class Alone(nn.Module):
    """A layer whose output is a tuple, as a `Computation` wants it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """The layer."""
        return (self.layer(x),)


def formula(module: nn.Module, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The layer plus `x @ A @ B`, of windows for a convolution, in fp64."""
    x, products = x.double(), first.double() @ second.double()
    bias = None if module.bias is None else module.bias.double()
    if isinstance(module, nn.Linear):
        added = torch.bmm(x.unsqueeze(1) if x.ndim == 2 else x, products)
        return F.linear(x, module.weight.double(), bias) + added.reshape(*x.shape[:-1], -1)
    plain = F.conv2d(x, module.weight.double(), bias, module.stride, module.padding)
    windows = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride).transpose(1, 2)
    return plain + torch.bmm(windows, products).transpose(1, 2).reshape(plain.shape)
