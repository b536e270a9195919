"""A compiled OpenVINO model as a `PreparedProgram`: one model with dynamic axes, one copy of the weights, any shape.

A small model computes a shape that recurs in .6 to .8 of the time once it is compiled for that shape alone, without the
factors that it does not have (measured: half the starter's UNet, 2 to 32 rows). Such a copy holds the weights once
more, and 24 to 48 MiB of generated code. So all copies of a program share a few bytes: large models never have one.
The first answer of a copy is compared with the model's, and a shape whose copy fails or differs has none from then on.
A size that one request asks for has none either: to compile one takes a core for seconds.

What a dynamic model computes depends on the first shape that it runs: self-attention that sees a single token there is
wrong for every longer sequence from then on (OpenVINO 2026.4). So every compiled model runs the probe before anything
else, and is used only if it answers as torch did.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
import torch

from plait_kernels.executors import AdaptedLayer, ExecutorError, RowFactors, background
from plait_kernels.executors.adapters import check_factors, flat_factors
from plait_kernels.executors.compiled_cache import CompiledCache
from plait_kernels.executors.openvino_core import core
from plait_kernels.heap import return_memory
from plait_kernels.threads import lower_priority

_log = logging.getLogger(__name__)

Key: TypeAlias = tuple[tuple[int, ...], ...]
"""The inputs' shapes, then the factors' rows, then every layer's rank."""

_CODE_BYTES = 24 << 20
"""What generated code holds; twice that if factors are inputs."""
_CALLS_BEFORE_COPY = 3
"""Requests of many ranks, each of which is a shape (`plait bench images --workload mixed16`), gained by few calls and
by room for many copies, and by neither alone."""
_SIZE_CALLS_BEFORE_COPY = 32
"""Of all shapes of a size, which has any rows, factors and ranks: more than the steps of nearly any one request."""
_CALLS_IN_USE = 200
"""A copy that was used within so many calls does not make room for another."""
_MAX_SEEN = 256
"""Of how many shapes, and sizes, is known how often they came, or that they have no copy."""
_LARGER, _SMALLER_CALLS = 4, 128
"""The model keeps what its largest shape took to compute in: 260 MiB where the starter made one image of 368x368. That
goes back after so many calls in a row whose input is at most a fourth of the largest one's."""
_SIZES_BEFORE_RETURN = 64
"""What is kept of each new size lies between memory that was freed: the C library gives that back after so many."""


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
        copies_bytes: int,
        free_bytes: Callable[[], int],
        probe: Probe,
        cache: CompiledCache,
    ) -> None:
        """Compile it, or take that from the cache; `options` are asked for before every run. `copies_bytes`: what all
        copies for single shapes hold at most; `free_bytes` returns what another one may hold now. Raises
        `ExecutorError` if the answer to the probe is not torch's."""
        self._model, self._model_inputs = model, len(model.inputs)  # a list of hundreds, made at each look
        self.layers = tuple(layers)
        self._options = options
        self._probe = probe
        self._cache = cache
        self._compiled_with = options()
        self._compiled = self._compile()
        self._running = threading.Lock()
        self._weight_bytes = _constant_bytes(model)
        self._copies_bytes, self._free_bytes = copies_bytes, free_bytes
        self._copies: OrderedDict[Key, _Copy] = OrderedDict()
        self._seen: OrderedDict[Key, int | None] = OrderedDict()  # None: a copy failed
        self._sizes: OrderedDict[Key, int | None] = OrderedDict()
        self._calls = 0
        self._largest = self._smaller_calls = self._new_sizes = 0
        self._is_copying = False

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs in the first input's dtype. Raises `ExecutorError` for factors of other rows."""
        self._check_count(inputs)
        check_factors(self.layers, inputs[0].shape[0], factors)
        with self._running:
            options = self._options()
            if options != self._compiled_with:  # a number of threads is part of what is compiled
                self._compiled_with = options
                self._compiled = self._compile()
                self._copies.clear()
            outputs = self._infer([value.detach().to(torch.float32) for value in inputs], factors)
            if inputs[0].dtype != torch.float32:
                return tuple(output.to(inputs[0].dtype) for output in outputs)
            return tuple(output.clone() if copy else output for output in outputs)

    def _infer(self, inputs: Sequence[torch.Tensor], factors: RowFactors | None) -> list[torch.Tensor]:
        """Return what the copy for these shapes computes, or the model for any."""
        key = self._key(inputs, factors)
        self._calls += 1
        self._may_release(inputs[0].numel())
        size_calls = _counted(self._sizes, tuple(tuple(value.shape[1:]) for value in inputs)) or 0
        if size_calls == 1:
            self._new_sizes += 1
            if self._new_sizes % _SIZES_BEFORE_RETURN == 0:
                _return_memory_aside()
        copy = self._copies.get(key)
        if copy is None:
            self._may_copy(key, is_rare=size_calls < _SIZE_CALLS_BEFORE_COPY)
            return self._compiled.infer(inputs, factors)
        self._copies.move_to_end(key)
        copy.used = self._calls
        outputs = copy.compiled.infer(inputs, factors)
        if not copy.is_proven:
            wanted = self._compiled.infer(inputs, factors)
            try:
                Probe(inputs=inputs, factors=factors, outputs=wanted, tolerance=self._probe.tolerance).check(outputs)
            except ExecutorError as error:
                self._give_up(key, error)
                return wanted
            copy.is_proven = True
        return outputs

    def _may_release(self, size: int) -> None:
        """Have the model give back what larger shapes took, if they do not come any more."""
        self._smaller_calls = self._smaller_calls + 1 if _LARGER * size <= self._largest else 0
        self._largest = max(self._largest, size)
        if self._smaller_calls == _SMALLER_CALLS:
            self._compiled.release()
            _return_memory_aside()
            self._largest, self._smaller_calls = size, 0

    def _key(self, inputs: Sequence[torch.Tensor], factors: RowFactors | None) -> Key:
        by_path, rows = ({}, 1) if factors is None else (factors.by_path, factors.given)
        ranks = tuple(by_path[layer.path][0].shape[2] if layer.path in by_path else 0 for layer in self.layers)
        return (*(tuple(value.shape) for value in inputs), (rows,), ranks)

    def _may_copy(self, key: Key, *, is_rare: bool) -> None:
        """Begin a copy for shapes that recur, if it fits in the place of such as are not in use; of a size that
        `is_rare`, only count them."""
        held = self._held_bytes(key)
        if held > self._copies_bytes or self._is_copying:
            return
        count = _counted(self._seen, key)
        if count is None or count < _CALLS_BEFORE_COPY or is_rare:
            return
        if self._free_bytes() < held or not self._make_room(held):
            return
        del self._seen[key]
        self._is_copying = True  # before the thread is there, which may be done at once
        background.start("plait-compile", partial(self._copy, key, self._compiled_with))

    def _make_room(self, nbytes: int) -> bool:
        """Drop copies that are not in use until so many bytes are free; return whether they are."""
        while sum(map(self._held_bytes, self._copies)) + nbytes > self._copies_bytes:
            key, copy = next(iter(self._copies.items()))
            if self._calls - copy.used < _CALLS_IN_USE:
                return False
            del self._copies[key]
        return True

    def _held_bytes(self, key: Key) -> int:
        """Return what a copy holds: weights, code, and the factors of its last call."""
        *_, (given,), ranks = key
        widths = ((layer.width_in + layer.width_out) * rank for layer, rank in zip(self.layers, ranks, strict=True))
        return self._weight_bytes + _CODE_BYTES * (2 if any(ranks) else 1) + 4 * given * sum(widths)

    def _copy(self, key: Key, options: dict[str, Any]) -> None:
        """Compile a copy; the worker's thread, which takes cores that steps leave idle."""
        lower_priority()
        try:
            layers = [layer for layer, rank in zip(self.layers, key[-1], strict=True) if rank]
            made = _Compiled(compile_model(fixed(self._model, self.layers, key), options), layers)
            with self._running:
                if options is self._compiled_with:
                    self._copies[key] = _Copy(compiled=made, used=self._calls)
        except Exception as error:
            with self._running:
                self._give_up(key, error)
        finally:
            self._is_copying = False

    def _give_up(self, key: Key, error: Exception) -> None:
        _log.info("%s has no program of its own: %s", key[0], " ".join(str(error).split())[:200])
        self._copies.pop(key, None)
        self._seen[key] = None

    def _check_count(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `ExecutorError` unless every input of the model gets something: computing without can crash."""
        if len(inputs) + 2 * len(self.layers) != self._model_inputs:
            raise ExecutorError(
                f"the model has {self._model_inputs} inputs, not {len(inputs)} and two for each of "
                f"{len(self.layers)} layers"
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
        found = _Compiled(compiled, self.layers)
        self._probe.check(found.infer(self._probe.inputs, self._probe.factors))
        return found


def _return_memory_aside() -> None:
    background.start("plait-return-memory", return_memory)  # .1 s, of a GB


def _counted(seen: OrderedDict[Key, int | None], key: Key) -> int | None:
    """Count one more of the newest `_MAX_SEEN`, unless it has no number; return the number."""
    count = seen.pop(key, 0)
    seen[key] = None if count is None else count + 1
    if len(seen) > _MAX_SEEN:
        seen.popitem(last=False)
    return seen[key]


def fixed(model: ov.Model, layers: Sequence[AdaptedLayer], key: Key) -> ov.Model:
    """Return a copy of a model for these shapes, without the factors of layers whose rank is 0. Raises RuntimeError or
    ValueError if the graph is not what `conversion` makes."""
    *inputs, (given,), ranks = key
    copy = model.clone()
    ports = list(copy.inputs)
    sizes = {port: ov.PartialShape(list(size)) for port, size in zip(ports, inputs, strict=False)}
    for i, (layer, rank) in enumerate(zip(layers, ranks, strict=True)):
        first, second = ports[len(inputs) + 2 * i], ports[len(inputs) + 2 * i + 1]
        if rank:
            sizes[first] = ov.PartialShape([given, layer.width_in, rank])
            sizes[second] = ov.PartialShape([given, rank, layer.width_out])
        else:
            _cut_off(second)
            copy.remove_parameter(first.get_node())
            copy.remove_parameter(second.get_node())
    copy.reshape(sizes)
    return copy


def _cut_off(factor: Any) -> None:
    """Replace the sum that the product with `factor` leads to by its other operand."""
    port = factor
    while True:
        targets = list(port.get_target_inputs())
        if len(targets) != 1:
            raise ValueError(f"a factor leads to {len(targets)} operations")
        node = targets[0].get_node()
        if node.get_type_name() == "Add":
            node.output(0).replace(node.input_value(1 - targets[0].get_index()))
            return
        port = node.output(0)


def _constant_bytes(model: Any) -> int:
    """Return the bytes of the constants in float32, which is what the compiled model holds."""
    sizes = (node.get_output_size() and np.prod(node.get_output_shape(0)) for node in model.get_ops()
             if node.get_type_name() == "Constant")  # fmt: skip
    return int(sum(sizes)) * 4


@dataclass(slots=True, kw_only=True)
class _Copy:
    """A model compiled for one shape. `used`: the last call that it computed; `is_proven`: it answered one right."""

    compiled: _Compiled
    used: int
    is_proven: bool = False


class _Compiled:
    """A compiled model's one request, and what it is bound to. One thread at a time."""

    def __init__(self, compiled: ov.CompiledModel, layers: Sequence[AdaptedLayer]) -> None:
        self._compiled = compiled
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

    def release(self) -> None:
        """Give back what calls are computed in; the next one takes what it needs."""
        self._compiled.release_memory()

    def _give(self, index: int, value: torch.Tensor) -> None:
        """Have the request read an input where it is. Nothing is done where it does: what is given is kept, so that
        nothing else can be at its place."""
        whole, before = value.contiguous(), self._given.get(index)
        if before is not None and before.data_ptr() == whole.data_ptr() and before.shape == whole.shape:
            return
        self._request.set_input_tensor(index, ov.Tensor(whole.numpy(), shared_memory=True))
        self._given[index] = whole
