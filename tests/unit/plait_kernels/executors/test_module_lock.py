"""Modules are built by one thread at a time: a library that loads may have patched how parameters are registered."""

from __future__ import annotations

import threading

import torch

from plait_kernels.executors import MODULES, Computation, InputSpec
from plait_kernels.executors.torch_program import TorchProgram


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return (2 * self.layer(x),)


def test_a_twin_is_not_built_while_another_thread_loads(monkeypatch):
    """While the lock is held, parameters land on the meta device, as in libraries' loaders; the twin's do not."""
    computation = Computation(
        module=Doubled(),
        inputs=(InputSpec(name="x", shape=(None, 3)),),
        example=(torch.zeros(1, 3),),
        takes_factors=True,
    )
    register = torch.nn.Module.register_parameter
    built = []

    def to_meta(module, name, parameter):
        register(module, name, None if parameter is None else torch.nn.Parameter(parameter.to("meta")))

    def load() -> None:
        with MODULES, monkeypatch.context() as patched:
            patched.setattr(torch.nn.Module, "register_parameter", to_meta)
            other.start()
            other.join(0.3)

    loader = threading.Thread(target=load)
    other = threading.Thread(target=lambda: built.append(TorchProgram(computation)))
    loader.start()
    loader.join()
    other.join()
    x = torch.ones(2, 3)
    assert torch.allclose(built[0].run([x])[0], computation.module(x)[0])
