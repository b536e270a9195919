"""A `graphs.Capture` without a GPU: it computes again into the same memory, as a replayed graph does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from plait_kernels.executors.graphs import Call


@dataclass(eq=False)
class FakeRecording:
    """Inputs and outputs of one captured call, at fixed addresses."""

    call: Call
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    replays: int = 0

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute the outputs of `inputs`, where those of the last replay were."""
        self.replays += 1
        for own, value in zip(self.inputs, inputs, strict=True):
            own.copy_(value)
        for own, value in zip(self.outputs, self.call(self.inputs), strict=True):
            own.copy_(value)
        return self.outputs


@dataclass(eq=False)
class FakeCapture:
    """Counts what it captures. `fails`: it captures nothing, as a device without memory."""

    fails: bool = False
    recordings: list[FakeRecording] = field(default_factory=list)
    tried: int = 0

    def __call__(self, call: Call, inputs: Sequence[torch.Tensor]) -> FakeRecording:
        """Record a call."""
        self.tried += 1
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        own = tuple(value.clone(memory_format=torch.preserve_format) for value in inputs)
        recording = FakeRecording(call, own, tuple(output.clone() for output in call(own)))
        for output in recording.outputs:
            output.fill_(float("nan"))  # nothing may read them before a replay
        self.recordings.append(recording)
        return recording
