"""The pooled int8 lookup: the ends of a row's range; `test_difference` has the formula."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.registry import IMPLS, load

torch.set_num_threads(1)


@pytest.fixture(params=[impl for impl in IMPLS if impl.op == "int8_lookup"], ids=lambda impl: impl.name)
def int8_lookup(request: pytest.FixtureRequest):
    """Every registered implementation."""
    return load("int8_lookup", "cpu", torch.float32, request.param.name)


def test_a_row_of_equal_values_and_the_ends_of_a_range_are_kept(int8_lookup):
    """Scale 0 is a row of its bias; q = 0 and q = 255 are its smallest and largest value."""
    values = torch.tensor([[2.5, 2.5, 2.5], [-1.0, 4.0, 0.0]])
    table = torch.ops.quantized.embedding_bag_byte_prepack(values)
    found = int8_lookup(table, torch.tensor([0, 1]), torch.tensor([0, 1, 2]))
    assert torch.allclose(found[0], values[0], atol=1e-6)
    assert torch.allclose(found[1, :2], values[1, :2], atol=1e-5)
