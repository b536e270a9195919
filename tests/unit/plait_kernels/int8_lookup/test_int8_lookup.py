"""The pooled int8 lookup: every implementation against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.registry import IMPLS, load

torch.set_num_threads(1)


def truth(table, ids, offsets, weights) -> torch.Tensor:
    """The formula, one id at a time, in fp64."""
    width = table.shape[1] - 8
    pooled = torch.zeros(len(offsets) - 1, width, dtype=torch.float64)
    for bag, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        for k in range(start, stop):
            stored = table[ids[k]]
            scale, bias = stored[width:].clone().view(torch.float32).double()
            pooled[bag] += (1.0 if weights is None else weights[k].double()) * (scale * stored[:width].double() + bias)
    return pooled


@pytest.fixture(params=[impl for impl in IMPLS if impl.op == "int8_lookup"], ids=lambda impl: impl.name)
def int8_lookup(request: pytest.FixtureRequest):
    """Every registered implementation."""
    return load("int8_lookup", "cpu", torch.float32, request.param.name)


def case(rows: int, width: int, sizes: list[int], *, weighted: bool, seed: int = 0):
    """A table, ids in bags of these sizes, and weights."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator) * 10
    table = torch.ops.quantized.embedding_bag_byte_prepack(values)
    ids = torch.randint(rows, (sum(sizes),), generator=generator)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return table, ids, offsets, torch.randn(sum(sizes), generator=generator) if weighted else None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 3, 8, 31, 64, 130])
def test_lookup_is_the_formula(int8_lookup, width, weighted):
    """Odd widths; bags empty, of one, and long, the first and the last empty too."""
    arguments = case(17, width, [0, 1, 5, 0, 90, 2, 0], weighted=weighted)
    found, wanted = int8_lookup(*arguments), truth(*arguments)
    assert found.dtype is torch.float32
    assert found.shape == wanted.shape
    assert float((found.double() - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max()) * 10
    assert not found[[0, 3, 6]].any()


def test_a_row_of_equal_values_and_the_ends_of_a_range_are_kept(int8_lookup):
    """Scale 0 is a row of its bias; q = 0 and q = 255 are its smallest and largest value."""
    values = torch.tensor([[2.5, 2.5, 2.5], [-1.0, 4.0, 0.0]])
    table = torch.ops.quantized.embedding_bag_byte_prepack(values)
    found = int8_lookup(table, torch.tensor([0, 1]), torch.tensor([0, 1, 2]))
    assert torch.allclose(found[0], values[0], atol=1e-6)
    assert torch.allclose(found[1, :2], values[1, :2], atol=1e-5)
