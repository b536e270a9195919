"""The two halves of a packaged model, ready to run: what `plait_disagg.workers` puts to work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from plait_disagg.graph.execute import Compiled
from plait_disagg.graph.inputs import Input
from plait_disagg.graph.program import USER_OF
from plait_disagg.workers.batch import join, user_of
from plait_disagg.workers.values import RankRequest

__all__ = ["CompiledDense", "CompiledSparse"]


class CompiledSparse:
    """Implements `SparseHalf` with the CN program."""

    def __init__(self, program: Compiled, inputs: Sequence[Input]) -> None:
        self._program = program
        self._inputs = tuple(inputs)
        self._needs_user_of = any(port.name == USER_OF for port in program.program.inputs)

    def run(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """See `SparseHalf`. Raises `BadId` for an id that only its table can refuse."""
        batch = join(self._inputs, requests)
        if self._needs_user_of:
            return self._program({**batch.tensors, USER_OF: batch.user_of})
        return self._program(batch.tensors)


class CompiledDense:
    """Implements `DenseHalf` with the HN program."""

    def __init__(self, program: Compiled, device: torch.device | str = "cpu") -> None:
        self._program = program
        self._device = torch.device(device)
        self._needs_user_of = any(port.name == USER_OF for port in program.program.inputs)

    def run(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """See `DenseHalf`. Outputs are on the CPU."""
        given = dict(crossing)
        if self._needs_user_of:
            given[USER_OF] = user_of(candidates)
        if self._device.type == "cpu":
            return self._program(given)
        outputs = self._program({name: tensor.to(self._device, non_blocking=True) for name, tensor in given.items()})
        return {name: tensor.cpu() for name, tensor in outputs.items()}
