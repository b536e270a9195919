"""What every adapter shares: features by name go in, and the library's own module is called the way it likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from plait_disagg.graph.inputs import Input

__all__ = ["Adapted", "Built", "Variants", "randomised"]

Built: TypeAlias = tuple[nn.Module, Sequence[Input]]
Variants: TypeAlias = Mapping[str, Callable[[], Built]]
"""Builders of a module and its inputs, by the name of the variant."""


class Adapted(nn.Module):
    """A library's model, called by `call(model, features)`; `features` are the declared inputs by name."""

    def __init__(self, model: nn.Module, call: Callable[[Any, dict[str, torch.Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.eval()

    def forward(self, **features: torch.Tensor) -> Any:
        """Return what the model makes of the features."""
        return self.call(self.model, features)


def randomised(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode, with parameters and statistics large enough that wrong scores would show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.dim() > 0:
                drawn = torch.randn(tensor.shape, generator=generator) * (0.5 if tensor.dim() == 1 else 0.15)
                tensor.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
    return model.eval()
