"""A module as recorded graphs: one for each set of input shapes, replayed without Python. Knows no CUDA: see `Capture`.

A graph reads the module's own parameters where they lie, so what is written into them (a merged LoRA) holds in the
next replay; they must keep their addresses. A shape runs eagerly once, which also lets libraries choose their kernels.
When it recurs it is captured: in a moment without work (`capture_waiting`), or in its turn once it has recurred often.
What cannot be captured runs eagerly, said once; where memory was short it is tried again later.

Inputs and outputs of a model's graphs lie in one set of buffers (`StaticBuffers`), as large as the largest shape;
those of others are views of it. What they compute in between is shared by all graphs of a device, so only one may run.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from plait_kernels.devices import empty_cache, free_bytes, is_device_lost, is_out_of_memory
from plait_kernels.executors import AdaptedLayer, ExecutorError, RowFactors

_log = logging.getLogger(__name__)

_BUDGET_SHARE = 0.25
"""Of what is free when a device's first graph is wanted: images, LoRAs and what runs eagerly need the rest."""
_TRIED_AGAIN_AFTER = 256
"""Runs of a shape for which there was no memory."""
_KEPT = 64
"""The most shapes of a program that are known; the least recently used go first."""

Slots: TypeAlias = Callable[[int], Sequence[str]]
"""The names of so many inputs, or outputs, among a model's buffers."""


class Recording(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Make the call again: it reads and writes the memory that it was captured with."""


class Capture(Protocol):
    """Records calls."""

    @property
    def pool_bytes(self) -> int:
        """What recordings share to compute in."""

    def __call__(self, call: Callable[[], None]) -> Recording:
        """Record a call that has been made before. Raises RuntimeError if that is not possible."""


@dataclass(frozen=True, slots=True)
class _Spec:
    """What a tensor is, but for its place. `is_last`: channels are its innermost axis."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_last: bool

    @classmethod
    def of(cls, value: torch.Tensor, rows: int | None = None) -> _Spec:
        """Return a tensor's, with another number of rows if one is given."""
        shape = tuple(value.shape) if rows is None else (rows, *value.shape[1:])
        is_last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return cls(shape, value.dtype, is_last and not value.is_contiguous())

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return such a tensor at the beginning of `flat`, bytes."""
        values = flat[: self.nbytes].view(self.dtype)
        if not self.is_last:
            return values.view(self.shape)
        rows, channels, height, width = self.shape
        return values.view(rows, height, width, channels).permute(0, 3, 1, 2)


class StaticBuffers:
    """What the graphs of one model read and write, by name."""

    def __init__(self, memory: GraphMemory) -> None:
        self.memory = memory
        self.programs: WeakSet[GraphProgram] = WeakSet()
        self.used = 0
        self._flat: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(flat.nbytes for flat in list(self._flat.values()))

    def views(self, names: Sequence[str], specs: Sequence[_Spec], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return tensors at these places. Graphs that use a place which must grow are dropped. Raises RuntimeError if
        there is no room."""
        short = {
            name: spec.nbytes
            for name, spec in zip(names, specs, strict=True)
            if name not in self._flat or self._flat[name].nbytes < spec.nbytes
        }
        if short:
            outgrown = [name for name in short if name in self._flat]
            self.memory.make_room(self, sum(short.values()) - sum(self._flat[name].nbytes for name in outgrown))
            self._drop_graphs(outgrown)
            for name in outgrown:
                del self._flat[name]
            for name, nbytes in short.items():
                self._flat[name] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return tuple(spec.view(self._flat[name]) for name, spec in zip(names, specs, strict=True))

    def clear(self) -> None:
        """Give up everything; shapes are captured again when they recur."""
        self._drop_graphs(self._flat)
        self._flat.clear()

    def _drop_graphs(self, names: Collection[str]) -> None:
        for program in self.programs:
            program.drop_graphs(names)


class GraphMemory:
    """The memory of all graphs on one device. One thread, and one stream."""

    def __init__(self, capture: Capture, *, budget_bytes: int) -> None:
        """`budget_bytes`: what all buffers together may take; those of the model that was used least lately go
        first."""
        self.capture = capture
        self.turns = count(1)
        self.given_up = 0
        """How often memory was short."""
        self._budget_bytes = budget_bytes
        self._models: WeakSet[StaticBuffers] = WeakSet()

    def buffers(self) -> StaticBuffers:
        """Return the buffers of one more model."""
        made = StaticBuffers(self)
        self._models.add(made)
        return made

    @property
    def nbytes(self) -> int:
        """What buffers take."""
        return sum(model.nbytes for model in list(self._models))

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(program.graphs for program in self._programs())

    def make_room(self, wanted: StaticBuffers, more_bytes: int) -> None:
        """Let buffers of other models go until one may take so much more. Raises RuntimeError."""
        others = sorted((it for it in self._models if it is not wanted and it.nbytes), key=lambda it: it.used)
        while self.nbytes + more_bytes > self._budget_bytes and others:
            others.pop(0).clear()
        if self.nbytes + more_bytes > self._budget_bytes:
            wants, may = (self.nbytes + more_bytes) / 1e9, self._budget_bytes / 1e9
            raise torch.OutOfMemoryError(f"graphs may take {may:.2f} GB, and this one's inputs and outputs {wants:.2f}")

    @torch.inference_mode()
    def capture_waiting(self) -> bool:
        """Capture a shape that has recurred; return whether there was one."""
        return any(program.capture_waiting() for program in self._programs())

    def give_up(self) -> None:
        """Let all graphs and buffers go, as memory was short."""
        self.given_up += 1
        for model in list(self._models):
            model.clear()

    def _programs(self) -> Iterator[GraphProgram]:
        return (program for model in list(self._models) for program in list(model.programs))


_ON: dict[torch.device, GraphMemory] = {}


def graph_memory(device: torch.device) -> GraphMemory:
    """Return the memory of graphs on a GPU of this process."""
    there = torch.empty(0, device=device).device  # with its number
    if there not in _ON:
        from plait_kernels.executors.cuda_capture import CudaCapture

        _ON[there] = GraphMemory(CudaCapture(there), budget_bytes=int(_BUDGET_SHARE * free_bytes(there)))
    return _ON[there]


def capture_waiting() -> bool:
    """Use a moment without work: capture a shape that has recurred; return whether there was one."""
    return any(memory.capture_waiting() for memory in on_gpus().values())


def give_back(device: torch.device, *, short: bool = False) -> None:
    """Give back to a GPU what nothing uses; where it is `short` of memory all graphs, too."""
    if short and (memory := _ON.get(device)) is not None:
        memory.give_up()
    empty_cache(device)


def give_up() -> None:
    """Have all graphs of this process give up what they have of its GPUs, as memory was short."""
    for device in on_gpus():
        give_back(device, short=True)


def on_gpus() -> Mapping[torch.device, GraphMemory]:
    """Return the memories of graphs of this process, by GPU. From any thread."""
    return dict(_ON)


def pool_bytes(device: torch.device) -> int:
    """Return what graphs have of a GPU to compute in, of which nothing else can take any."""
    return _ON[device].capture.pool_bytes if device in _ON else 0


def padded(rows: int) -> int:
    """Return the least of 1, 1 1/4, 1 1/2 times a power of two that is a whole number of at least so many rows: few
    sizes, of which at most a quarter is for nothing."""
    power = 1 << max(0, rows.bit_length() - 3)
    return next(size for size in (power * quarter for quarter in (1, 2, 3, 4, 5, 6, 8)) if size >= rows)


@dataclass(slots=True, eq=False)
class _Graph:
    recording: Recording
    names: frozenset[str]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(slots=True, eq=False)
class _Shape:
    """A shape that has been seen. `refused_until`: the run in which it is tried again, if it could not be captured."""

    specs: tuple[_Spec, ...]
    runs: int = 0
    graph: _Graph | None = None
    refused_until: float = 0.0

    @property
    def is_refused(self) -> bool:
        return self.runs < self.refused_until


class GraphProgram:
    """A `PreparedProgram` over a module's live parameters. It takes no factors: LoRA sets are merged.

    One thread only, and on one stream: graphs share their working memory.
    """

    layers: tuple[AdaptedLayer, ...] = ()

    def __init__(
        self,
        module: nn.Module,
        buffers: StaticBuffers,
        *,
        name: str,
        inputs: Slots = lambda many: [*map("in.{}".format, range(many))],
        outputs: Slots = lambda many: [*map("out.{}".format, range(many))],
        pads: bool = False,
        patience: int = 1,
        kept: int = _KEPT,
    ) -> None:
        """Take a module that returns a tuple of tensors. `name` is for the log. `buffers` may be those of several
        programs: where an input is called as another one's output, it is read where that one wrote it. `pads`: all
        inputs and outputs have a row each of a batch, which is filled up to few sizes. `patience`: the runs of a shape
        that wait for a moment without work."""
        self._module = module
        self._buffers = buffers
        self._name = name
        self._inputs, self._outputs = inputs, outputs
        self._pads, self._patience, self._kept = pads, patience, kept
        self._shapes: OrderedDict[tuple[_Spec, ...], _Shape] = OrderedDict()
        self._device = torch.device("cpu")
        buffers.programs.add(self)

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(shape.graph is not None for shape in list(self._shapes.values()))

    @torch.inference_mode()
    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs in the module's dtype. Raises `ExecutorError` for factors."""
        if factors is not None and factors.by_path:
            raise ExecutorError(f"{self._name} takes no factors")
        rows = len(inputs[0])
        specs = tuple(_Spec.of(value, padded(rows) if self._pads else None) for value in inputs)
        shape = self._seen(specs)
        self._device = inputs[0].device
        if shape.graph is None and shape.runs > self._patience:
            self._record(shape)
        if shape.graph is None:
            return tuple(self._module(*inputs))
        self._buffers.used = next(self._buffers.memory.turns)
        for own, value in zip(shape.graph.inputs, inputs, strict=True):
            if not _same_place(own, value):
                (own[:rows] if self._pads else own).copy_(value)
        shape.graph.recording.replay()
        made = shape.graph.outputs
        lent = tuple(output[:rows] for output in made) if self._pads else made
        return tuple(output.clone() for output in lent) if copy else lent

    def drop_graphs(self, names: Collection[str]) -> None:
        """Drop the graphs that use one of these buffers."""
        for shape in self._shapes.values():
            if shape.graph is not None and not shape.graph.names.isdisjoint(names):
                shape.graph = None

    def capture_waiting(self) -> bool:
        """Capture a shape that has recurred, the latest first; return whether there was one."""
        for shape in reversed(self._shapes.values()):
            if shape.graph is None and shape.runs > 1 and not shape.is_refused:
                self._record(shape)
                return True
        return False

    def _seen(self, specs: tuple[_Spec, ...]) -> _Shape:
        shape = self._shapes.setdefault(specs, _Shape(specs))
        self._shapes.move_to_end(specs)
        if len(self._shapes) > self._kept:
            self._shapes.popitem(last=False)
        shape.runs += 1
        return shape

    def _record(self, shape: _Shape) -> None:
        if shape.is_refused:
            return
        try:
            shape.graph = self._recorded(shape.specs)
        except RuntimeError as error:
            if is_device_lost(error):
                raise
            short = is_out_of_memory(error)
            shape.refused_until = shape.runs + _TRIED_AGAIN_AFTER if short else math.inf
            said = " ".join(str(error).split())[:300]
            _log.warning("%s at %s runs eagerly: %s", self._name, list(shape.specs[0].shape), said)
            give_back(self._device)

    def _recorded(self, specs: tuple[_Spec, ...]) -> _Graph:
        """Capture a shape. What its buffers hold meanwhile does not matter."""
        names = self._inputs(len(specs))
        inputs = self._buffers.views(names, specs, self._device)
        for value in inputs:
            if not value.is_floating_point():  # of an index: it must not lead out of a table
                value.zero_()
        found = [_Spec.of(output) for output in self._module(*inputs)]
        made = self._outputs(len(found))
        outputs = self._buffers.views(made, found, self._device)

        def call() -> None:
            for own, value in zip(outputs, self._module(*inputs), strict=True):
                own.copy_(value)

        return _Graph(self._buffers.memory.capture(call), frozenset((*names, *made)), inputs, outputs)


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
    )
