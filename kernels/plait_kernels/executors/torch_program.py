"""The reference: torch runs the twin eagerly over the live parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait_kernels.executors import MODULES, Computation, RowFactors
from plait_kernels.executors.adapters import Twin, check_factors, flat_factors


class TorchProgram:
    """A `PreparedProgram` that calls the twin. Changes to the module's parameters take effect at once."""

    def __init__(self, computation: Computation) -> None:
        with MODULES:
            self._twin = Twin(computation)
        self.layers = self._twin.layers

    @torch.inference_mode()
    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs. They are always the caller's own, whatever `copy` is."""
        del copy
        rows = inputs[0].shape[0]
        check_factors(self.layers, rows, factors)
        wide = [value.to(torch.float32) for value in inputs]
        outputs = self._twin(*wide, *flat_factors(self.layers, factors))
        return tuple(output.to(inputs[0].dtype) for output in outputs)
