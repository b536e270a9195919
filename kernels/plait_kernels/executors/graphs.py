"""A module as recorded graphs: one for each set of input shapes, replayed without Python. Knows no CUDA: see `capture`.

A graph reads the module's own parameters where they lie, so what is written into them (a merged LoRA) holds in the
next replay; they must keep their addresses. A shape runs eagerly once, which also lets libraries choose their
kernels, and is captured when it comes again. What cannot be captured runs eagerly, said once.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import nn

from plait_kernels.device_errors import is_device_lost
from plait_kernels.executors import AdaptedLayer, ExecutorError, RowFactors

_log = logging.getLogger(__name__)

Call: TypeAlias = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
_Key: TypeAlias = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


class Recording(Protocol):
    """A captured call."""

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute the outputs for inputs of the captured shapes; they live until the next replay."""


class Capture(Protocol):
    """Records calls."""

    def __call__(self, call: Call, inputs: Sequence[torch.Tensor]) -> Recording:
        """Record `call` at the inputs' shapes. Raises RuntimeError if that is not possible."""


class GraphProgram:
    """A `PreparedProgram` over a module's live parameters. It takes no factors: LoRA sets are merged.

    One thread only, and on one stream: graphs share their working memory.
    """

    def __init__(self, module: nn.Module, capture: Capture, *, name: str, kept: int = 64) -> None:
        """Take a module that returns a tuple of tensors. `name` is for the log. `kept`: the most graphs, and the most
        shapes without one; the least recently used go first."""
        self._module = module
        self._capture = capture
        self._name = name
        self._kept = kept
        self._recordings: OrderedDict[_Key, Recording | None] = OrderedDict()  # None: not captured yet
        self._refused: dict[_Key, None] = {}
        self._settled = True

    @property
    def layers(self) -> tuple[AdaptedLayer, ...]:
        """None."""
        return ()

    @property
    def settled(self) -> bool:
        """Whether the last run's shapes have a graph, or never will."""
        return self._settled

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(recording is not None for recording in self._recordings.values())

    @torch.inference_mode()
    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs in the module's dtype. Raises `ExecutorError` for factors."""
        if factors is not None and factors.by_path:
            raise ExecutorError(f"{self._name} takes no factors")
        key = tuple((value.shape, value.stride(), value.dtype) for value in inputs)
        recording = self._recording(key, inputs)
        self._settled = recording is not None or key in self._refused
        if recording is None:
            return self._eagerly(inputs)
        outputs = recording.replay(inputs)
        return tuple(output.clone() for output in outputs) if copy else outputs

    def forget(self) -> None:
        """Drop all graphs: the parameters have moved."""
        self._recordings.clear()
        self._refused.clear()

    def _recording(self, key: _Key, inputs: Sequence[torch.Tensor]) -> Recording | None:
        if key in self._refused:
            return None
        if key not in self._recordings:
            self._recordings[key] = None
            if len(self._recordings) > self._kept:
                self._recordings.popitem(last=False)
            return None
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        if recording is None:
            recording = self._record(key, inputs)
        return recording

    def _record(self, key: _Key, inputs: Sequence[torch.Tensor]) -> Recording | None:
        try:
            recording = self._capture(self._eagerly, inputs)
        except RuntimeError as error:  # out of memory is one, too
            if is_device_lost(error):
                raise
            _log.warning("%s at %s runs eagerly: %s", self._name, list(key[0][0]), " ".join(str(error).split())[:300])
            del self._recordings[key]
            self._refused[key] = None
            if len(self._refused) > self._kept:
                del self._refused[next(iter(self._refused))]
            return None
        self._recordings[key] = recording
        return recording

    def _eagerly(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(self._module(*inputs))
