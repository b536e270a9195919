"""A converted model compiled for one set of shapes, with memory of its own for inputs and outputs.

For small models that are asked thousands of times a second. Handing OpenVINO a tensor costs 5 to 7 us each from Python
(a model with 28 inputs spent 150 us so, and 150 us computing); copying into memory that it already has costs .4 us.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import openvino as ov
import torch

from plait_kernels.executors import AdaptedLayer, Computation, ExecutorError, RowFactors
from plait_kernels.executors.conversion import convert
from plait_kernels.executors.openvino_core import core
from plait_kernels.executors.openvino_executor import OpenVinoSettings

_MAX_VIEWS = 256


class StaticPrograms:
    """A computation without factors, converted once in memory and compiled for any set of shapes that is asked for."""

    def __init__(self, computation: Computation) -> None:
        """Convert it. Raises `ExecutorError`."""
        self._computation = computation  # the model's constants are the module's memory
        self._model, _ = convert(computation)

    def compile(self, shapes: Sequence[tuple[int, ...]], settings: OpenVinoSettings) -> StaticProgram:
        """Return a program for inputs of these shapes. Raises `ExecutorError`."""
        try:
            model = self._model.clone()
            sizes = zip(model.inputs, shapes, strict=True)
            model.reshape({port: ov.PartialShape(list(shape)) for port, shape in sizes})
            request = core().compile_model(model, "CPU", settings.options()).create_infer_request()
            return StaticProgram(request, self._computation)
        except ExecutorError:
            raise
        except Exception as error:
            raise ExecutorError(f"compiling failed: {' '.join(str(error).split())[:300]}") from error


class StaticProgram:
    """A `PreparedProgram` for one set of shapes. A call may have fewer rows: what is behind them is computed, too, and
    cut off, so rows must not see each other and an output's first axis must be an item-side input's."""

    layers: tuple[AdaptedLayer, ...] = ()

    def __init__(self, request: Any, computation: Computation) -> None:
        """Raises `ExecutorError` if an output's shape is not known."""
        if any(port.get_partial_shape().is_dynamic for port in request.get_compiled_model().outputs):
            raise ExecutorError("an output's shape depends on more than the inputs' shapes")
        self._request = request
        self._kept = computation
        self._inputs = [torch.from_numpy(tensor.data) for tensor in request.input_tensors]
        for memory in self._inputs:
            memory.zero_()
        request.infer()  # outputs get their memory
        self._outputs = [torch.from_numpy(tensor.data) for tensor in request.output_tensors]
        self._views: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._running = threading.Lock()

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs; they have all rows of the compiled shape. Raises `ExecutorError` for factors."""
        if factors is not None:
            raise ExecutorError("this program takes no factors")
        with self._running:
            torch._foreach_copy_(self._memory(tuple([value.shape[0] for value in inputs])), list(inputs))
            self._request.infer()
            return tuple([output.clone() for output in self._outputs] if copy else self._outputs)

    def _memory(self, rows: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the inputs' memory as far as so many rows reach; slicing costs as much as copying."""
        found = self._views.get(rows)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            cut = [memory[:count] for memory, count in zip(self._inputs, rows, strict=True)]
            found = self._views[rows] = cut
        return found
