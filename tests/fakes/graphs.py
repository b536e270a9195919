"""A `graphs.Capture` without a GPU: it makes the call again, as a replayed graph does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from plait_kernels.executors.graphs import GraphMemory, StaticBuffers


@dataclass(eq=False)
class FakeRecording:
    """One captured call."""

    call: Callable[[], None]
    replays: int = 0

    def replay(self) -> None:
        """Make the call."""
        self.replays += 1
        self.call()


@dataclass(eq=False)
class FakeCapture:
    """Counts what it captures. `fails`: it captures nothing, as a device without memory."""

    fails: bool = False
    recordings: list[FakeRecording] = field(default_factory=list)
    tried: int = 0
    pool_bytes: int = 0

    def __call__(self, call: Callable[[], None]) -> FakeRecording:
        """Record a call."""
        self.tried += 1
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        recording = FakeRecording(call)
        self.recordings.append(recording)
        return recording

    def buffers(self, budget_bytes: int = 1 << 40) -> StaticBuffers:
        """Those of a model on a device of its own."""
        return GraphMemory(self, budget_bytes=budget_bytes).buffers()
