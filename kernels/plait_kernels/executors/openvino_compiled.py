"""A compiled OpenVINO model and what is bound to its requests.

A model for one shape may have several streams: a call's rows are divided among them, and each computes its own with
fewer threads. They meet at the end of the call and not after each layer, where a small model's threads wait for each
other for as long as they compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import openvino as ov
import torch

from plait_kernels.executors import AdaptedLayer, ExecutorError, RowFactors
from plait_kernels.executors.adapters import flat_factors
from plait_kernels.executors.openvino_core import core

MAX_STREAMS = 4
"""Each holds generated code of its own."""


def streams_for(rows: int, threads: int) -> int:
    """Return how many streams a call of so many rows is divided among: each gets as many rows and threads."""
    return max(n for n in range(1, MAX_STREAMS + 1) if math.gcd(rows, threads) % n == 0)


def compile_model(model: ov.Model, options: Mapping[str, Any], *, streams: int = 1) -> ov.CompiledModel:
    """Return the model compiled for this processor."""
    return core().compile_model(model, "CPU", {**options, "NUM_STREAMS": streams})


class CompiledModel:
    """One thread at a time. `rows`: the number of rows of a model for one shape; 0: any. `nbytes`: what it holds,
    roughly. `used`: the call that used it last."""

    def __init__(
        self,
        compiled: ov.CompiledModel,
        layers: Sequence[AdaptedLayer],
        *,
        rows: int = 0,
        streams: int = 1,
        nbytes: int = 0,
    ) -> None:
        """Take what was compiled with so many streams and takes the factors of `layers`; for one shape it is that of a
        stream's rows."""
        self.layers = tuple(layers)
        self.rows = rows
        self.nbytes = nbytes
        self.used = 0
        self.bound_rows = -1
        self._bound: RowFactors | None = None
        self._requests = [compiled.create_infer_request() for _ in range(streams)]
        self._given: dict[int, torch.Tensor] = {}
        self._outputs = self._shared_outputs(compiled) if streams > 1 else []

    def computed(self, rows: int) -> int:
        """Return how many rows are computed for a call of so many."""
        return -(-rows // self.rows) * self.rows if self.rows else rows

    def infer(self, inputs: Sequence[torch.Tensor], factors: RowFactors | None) -> list[torch.Tensor]:
        """Return the outputs, in memory that the next call overwrites. More rows than the model has are computed in
        turns; then all have to have the same factors."""
        rows = len(inputs[0])
        if not 0 < self.rows < rows:
            return self._infer(inputs, factors)
        whole: list[torch.Tensor] = []
        for start in range(0, rows, self.rows):
            part = self._infer([value[start : start + self.rows] for value in inputs], factors)
            whole = whole or [torch.empty(rows, *output.shape[1:]) for output in part]
            for output, own in zip(whole, part, strict=True):
                output[start : start + len(own)] = own
        return whole

    def _infer(self, inputs: Sequence[torch.Tensor], factors: RowFactors | None) -> list[torch.Tensor]:
        rows = len(inputs[0])
        computed = self.rows or rows
        self._bind(computed, factors, len(inputs))
        for index, value in enumerate(inputs):
            self._give(index, _filled(value, computed).contiguous())
        self._compute()
        outputs = self._outputs or [torch.from_numpy(tensor.data) for tensor in self._requests[0].output_tensors]
        if self.rows:
            self._outputs = outputs  # they stay where they are
        return [output[:rows] for output in outputs] if computed != rows else outputs

    def _compute(self) -> None:
        if len(self._requests) == 1:
            self._requests[0].infer()
            return
        for request in self._requests:
            request.start_async()
        for request in self._requests:
            request.wait()

    def _bind(self, rows: int, factors: RowFactors | None, first: int) -> None:
        """Give the requests their factors, unless they have them: a batch keeps them for many steps."""
        if self.bound_rows == rows and self._bound is factors:
            return
        given = 1 if factors is None or factors.given == 1 else rows
        for index, tensor in enumerate(flat_factors(self.layers, factors)):
            self._give(first + index, _filled(tensor, given).contiguous(), divided=given > 1)
        self._bound, self.bound_rows = factors, rows

    def _give(self, index: int, whole: torch.Tensor, *, divided: bool = True) -> None:
        """Have the requests read an input where it is: each its own rows, or all the same. Nothing is done where they
        do: what is given is kept, so that nothing else can be at its place."""
        before = self._given.get(index)
        if before is not None and before.data_ptr() == whole.data_ptr() and before.shape == whole.shape:
            return
        count = len(self._requests) if divided else 1
        parts = [ov.Tensor(part.numpy(), shared_memory=True) for part in whole.chunk(count)]
        for k, request in enumerate(self._requests):
            request.set_input_tensor(index, parts[k % count])
        self._given[index] = whole

    def _shared_outputs(self, compiled: Any) -> list[torch.Tensor]:
        """Return memory for whole outputs, of which each request writes its own rows. Raises `ExecutorError`."""
        count, found = len(self._requests), []
        for index, port in enumerate(compiled.outputs):
            rows, *size = port.shape
            if rows * count != self.rows:
                raise ExecutorError(f"output {index} has {rows} rows, not {self.rows // count}")
            whole = torch.empty(rows * count, *size)
            for request, part in zip(self._requests, whole.chunk(count), strict=True):
                request.set_output_tensor(index, ov.Tensor(part.numpy(), shared_memory=True))
            found.append(whole)
        return found


def _filled(value: torch.Tensor, rows: int) -> torch.Tensor:
    """Return `value (R, ...)` with rows of zeros after its own, so that there are `rows`."""
    missing = rows - len(value)
    return torch.cat([value, value.new_zeros(missing, *value.shape[1:])]) if missing else value
