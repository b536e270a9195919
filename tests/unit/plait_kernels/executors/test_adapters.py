"""Which layers take no factors, what their twin shares with a module, and when it is built; `test_difference` has those
that do."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from plait_kernels.executors import MODULES
from plait_kernels.executors.adapters import Twin, adapted_layer, flat_factors
from plait_kernels.executors.torch_program import TorchProgram
from support.executors import small_block, small_computation


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(2, 4, 1, groups=2),
        nn.Conv2d(2, 3, 3, dilation=2),
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.LayerNorm(2),
    ],
    ids=str,
)
def test_other_layers_than_linear_ones_and_plain_convolutions_are_not_adapted(module):
    """Their factors would compute something else."""
    assert adapted_layer("it", module) is None


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


def test_a_twin_is_not_built_while_another_thread_loads(monkeypatch):
    """While the lock is held, parameters land on the meta device, as in libraries' loaders; the twin's do not."""
    computation, built, register = small_computation(small_block()), [], nn.Module.register_parameter

    def to_meta(module, name, parameter):
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta")))

    def load() -> None:
        with MODULES, monkeypatch.context() as patched:
            patched.setattr(nn.Module, "register_parameter", to_meta)
            other.start()
            other.join(0.3)

    loader = threading.Thread(target=load)
    other = threading.Thread(target=lambda: built.append(TorchProgram(computation)))
    loader.start()
    loader.join()
    other.join()
    assert built[0].run(computation.example)[0].device == torch.device("cpu")
