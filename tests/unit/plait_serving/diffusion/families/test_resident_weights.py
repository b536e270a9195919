"""Weights that are in memory only while torch runs the module."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plait_serving.diffusion.families.resident_weights import ResidentWeights


def module(dtype: torch.dtype) -> nn.Module:
    """Two layers, the same values whatever the dtype."""
    made = nn.ModuleDict({"head": nn.Linear(3, 3), "body": nn.Linear(3, 3)})
    for i, parameter in enumerate(made.parameters()):
        parameter.data = torch.full(parameter.shape, 0.1 * (i + 1)).half().to(dtype)
    return made.requires_grad_(requires_grad=False)


FILE = module(torch.float16)


@pytest.fixture
def mapped():
    """A module as the file holds it, and its keeper; the head stays in memory."""
    live, part = module(torch.float16), SimpleNamespace(dtype=torch.float32, mapped=lambda: FILE)
    return live, ResidentWeights(live, name="it", part=part, resident=False, always=("head", "missing"))


def test_weights_come_and_go(mapped):
    """Taken: float32 copies. Released: the file's own bytes, but for the part that always stays. The parameters are
    the same objects: whoever holds one sees the change."""
    live, weights = mapped
    objects = [id(parameter) for parameter in live.parameters()]
    assert not weights.resident
    assert (live["head"].weight.dtype, live["body"].weight.dtype) == (torch.float32, torch.float16)
    kept = live["head"].weight.data_ptr()
    assert kept != FILE["head"].weight.data_ptr()
    weights.take()
    assert weights.resident
    assert {parameter.dtype for parameter in live.parameters()} == {torch.float32}
    assert torch.equal(live["body"].weight, FILE["body"].weight.float())
    assert live["head"].weight.data_ptr() == kept, "it may be running: its memory must not be freed under it"
    weights.release()
    assert live["body"].weight.data_ptr() == FILE["body"].weight.data_ptr()
    assert (live["head"].weight.data_ptr(), live["head"].weight.dtype) == (kept, torch.float32)
    assert [id(parameter) for parameter in live.parameters()] == objects


def test_what_torch_writes_never_reaches_the_file(mapped):
    """A merge into taken weights is lost at release; the file's are pristine, and so are those that come next."""
    live, weights = mapped
    before = FILE["body"].weight.clone()
    weights.take()
    live["body"].weight.fill_(7.0)
    weights.release()
    weights.take()
    assert torch.equal(FILE["body"].weight, before)
    assert torch.equal(live["body"].weight, before.float())
