"""A dense half on a GPU: its program as graphs, one for each bucket of batch sizes, replayed without Python.

A batch is filled up to its bucket with zeros, whose rows nobody sees: rows of a program do not see each other.
"""

from __future__ import annotations

import threading

import torch

from plait_disagg.dense.buckets import filled_up
from plait_disagg.dense.trial import Given
from plait_disagg.graph.execute import Compiled
from plait_kernels.executors.graphs import GraphMemory, GraphProgram


class DenseGraphs:
    """Graphs of `compiled`, whose constants are on `device`. Threads take turns."""

    def __init__(self, compiled: Compiled, device: torch.device, memory: GraphMemory) -> None:
        """Capture nothing yet: a bucket is captured when it comes again."""
        self._ports = compiled.program.inputs
        self._outputs = tuple(name for name, _ in compiled.program.outputs)
        self._device = device
        self._turn = threading.Lock()
        self._program = GraphProgram(compiled.as_module().eval(), memory.buffers(), name="the dense half")

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return self._program.graphs

    def run(self, given: Given, users: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the outputs of a batch of `users` users and `rows` candidates, on the CPU."""
        inputs = [
            self._filled(given[port.name], filled_up(users if port.rows == "user" else rows)) for port in self._ports
        ]
        with self._turn:  # a replay overwrites what the last one lent
            made = self._program.run(inputs, copy=False)
            return {name: value[:rows].to("cpu", copy=True) for name, value in zip(self._outputs, made, strict=True)}

    def _filled(self, value: torch.Tensor, count: int) -> torch.Tensor:
        """Return a tensor of `count` rows on the device; rows beyond those of `value` are zeros."""
        if len(value) == count:
            return value.to(self._device)
        made = torch.zeros(count, *value.shape[1:], dtype=value.dtype, device=self._device)
        made[: len(value)] = value
        return made
