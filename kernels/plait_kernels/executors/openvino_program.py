"""A compiled OpenVINO model as a `PreparedProgram`: one model with dynamic axes, one copy of the weights, any shape.

What a dynamic model computes depends on the first shape that it runs: self-attention that sees a single token there is
wrong for every longer sequence from then on (OpenVINO 2026.4). So every compiled model runs the probe before anything
else, and is used only if it answers as torch did.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openvino as ov
import torch

from plait_kernels.executors import AdaptedLayer, ExecutorError, RowFactors
from plait_kernels.executors.adapters import check_factors, flat_factors
from plait_kernels.executors.compiled_cache import CompiledCache
from plait_kernels.executors.openvino_core import core

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """A call and torch's answer in float32; `tolerance` is a share of the largest number of an output."""

    inputs: Sequence[torch.Tensor]
    factors: RowFactors | None
    outputs: Sequence[torch.Tensor]
    tolerance: float

    def check(self, got: Sequence[torch.Tensor]) -> None:
        """Raise `ExecutorError` for an answer that differs by more."""
        for mine, wanted in zip(got, self.outputs, strict=True):
            difference, scale = float((mine - wanted).abs().max()), float(wanted.abs().max())
            if not difference <= self.tolerance * max(scale, 1e-6):
                raise ExecutorError(f"it differs from torch by {difference:.2g} on outputs up to {scale:.2g}")


def compile_model(model: ov.Model, options: Mapping[str, Any]) -> ov.CompiledModel:
    """Return the model compiled for this processor."""
    return core().compile_model(model, "CPU", options)


class OpenVinoProgram:
    """A `PreparedProgram` over a converted model."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[AdaptedLayer],
        *,
        options: Callable[[], dict[str, Any]],
        probe: Probe,
        cache: CompiledCache,
    ) -> None:
        """Compile it, or take that from the cache; `options` are asked for before every run. Raises `ExecutorError` if
        the answer to the probe is not torch's."""
        self._model = model
        self._layers = tuple(layers)
        self._options = options
        self._probe = probe
        self._cache = cache
        self._compiled_with = options()
        self._compiled = self._compile()
        self._running = threading.Lock()

    @property
    def layers(self) -> tuple[AdaptedLayer, ...]:
        """The layers that take factors."""
        return self._layers

    @property
    def settled(self) -> bool:
        """Always: nothing is compiled for a shape."""
        return True

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs in the first input's dtype. Raises `ExecutorError` for factors of other rows."""
        self._check_count(inputs)
        check_factors(self._layers, inputs[0].shape[0], factors)
        with self._running:
            options = self._options()
            if options != self._compiled_with:  # a number of threads is part of what is compiled
                self._compiled_with = options
                self._compiled = self._compile()
            outputs = self._compiled.infer([value.detach().to(torch.float32) for value in inputs], factors)
            if inputs[0].dtype != torch.float32:
                return tuple(output.to(inputs[0].dtype) for output in outputs)
            return tuple(output.clone() if copy else output for output in outputs)

    def _check_count(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `ExecutorError` unless every input of the model gets something: computing without can crash."""
        if len(inputs) + 2 * len(self._layers) != len(self._model.inputs):
            raise ExecutorError(
                f"the model has {len(self._model.inputs)} inputs, not {len(inputs)} and two for each of "
                f"{len(self._layers)} layers"
            )

    def _compile(self) -> _Compiled:
        """Compile, unless that was kept, and run the probe before anything else."""
        self._check_count(self._probe.inputs)
        kept = self._cache.load(self._compiled_with)
        if kept is not None:
            try:
                return self._proven(kept)
            except Exception as error:
                _log.info("what was compiled before is compiled anew: %s", " ".join(str(error).split())[:200])
        compiled = compile_model(self._model, self._compiled_with)
        proven = self._proven(compiled)
        self._cache.save(self._compiled_with, compiled)
        return proven

    def _proven(self, compiled: ov.CompiledModel) -> _Compiled:
        """Run the probe. Raises `ExecutorError` if the answer is not torch's."""
        found = _Compiled(compiled, self._layers)
        self._probe.check(found.infer(self._probe.inputs, self._probe.factors))
        return found


class _Compiled:
    """A compiled model's one request, and what it is bound to. One thread at a time."""

    def __init__(self, compiled: ov.CompiledModel, layers: Sequence[AdaptedLayer]) -> None:
        self._request = compiled.create_infer_request()
        self._layers = layers
        self._bound: tuple[int, RowFactors | None] = (-1, None)
        self._given: dict[int, torch.Tensor] = {}

    def infer(self, inputs: Sequence[torch.Tensor], factors: RowFactors | None) -> list[torch.Tensor]:
        """Return the outputs, in memory that the next call overwrites."""
        rows, bound = len(inputs[0]), self._bound
        if bound[0] != rows or bound[1] is not factors:  # a batch keeps them for many steps
            for index, tensor in enumerate(flat_factors(self._layers, factors)):
                self._give(len(inputs) + index, tensor)
            self._bound = rows, factors
        for index, value in enumerate(inputs):
            self._give(index, value)
        self._request.infer()
        return [torch.from_numpy(tensor.data) for tensor in self._request.output_tensors]

    def _give(self, index: int, value: torch.Tensor) -> None:
        """Have the request read an input where it is. Nothing is done where it does: what is given is kept, so that
        nothing else can be at its place."""
        whole, before = value.contiguous(), self._given.get(index)
        if before is not None and before.data_ptr() == whole.data_ptr() and before.shape == whole.shape:
            return
        self._request.set_input_tensor(index, ov.Tensor(whole.numpy(), shared_memory=True))
        self._given[index] = whole
