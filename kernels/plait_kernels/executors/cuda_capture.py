"""CUDA graphs: `graphs.Capture` on a GPU.

Of each call several forms are captured, which differ in the attention kernel that torch prefers, and the fastest
replay is kept: which kernel wins depends on the shape and the card.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from plait_kernels.executors.graphs import Call

_log = logging.getLogger(__name__)

_PREFERRED: dict[str, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
}
"""Attention kernels in order of preference: those after the first take what it cannot."""

_WARM_UPS, _TIMED = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CudaRecording:
    """A graph with its own inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        for own, value in zip(self.inputs, inputs, strict=True):
            if own.data_ptr() != value.data_ptr():
                own.copy_(value)
        self.graph.replay()
        return self.outputs


class CudaCapture:
    """Captures calls on one device; the graphs share a pool of memory, so they must be replayed on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)

    def __call__(self, call: Call, inputs: Sequence[torch.Tensor]) -> _CudaRecording:
        """Capture every form and return the fastest. Raises RuntimeError if none can be captured."""
        own = tuple(value.clone(memory_format=torch.preserve_format) for value in inputs)
        found: dict[str, tuple[float, _CudaRecording]] = {}
        failure: RuntimeError | None = None
        for name, backends in _PREFERRED.items():
            try:
                with sdpa_kernel(backends, set_priority=True):
                    recording = self._captured(call, own)
                found[name] = self._replay_ms(recording), recording
            except RuntimeError as error:
                failure = error
        if not found:
            raise failure or RuntimeError("no form was captured")
        best = min(found, key=lambda name: found[name][0])
        said = ", ".join(f"{name} {ms:.2f} ms" for name, (ms, _) in found.items())
        _log.info("captured %s: %s; kept %s", tuple(own[0].shape), said, best)
        return found[best][1]

    def _captured(self, call: Call, own: tuple[torch.Tensor, ...]) -> _CudaRecording:
        """Run the call until libraries have chosen their kernels, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                call(own)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on using the device (decoding, loading) while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = call(own)
        return _CudaRecording(graph=graph, inputs=own, outputs=outputs)

    def _replay_ms(self, recording: _CudaRecording) -> float:
        """Return the median milliseconds of a replay."""
        cuda: Any = torch.cuda
        taken: list[float] = []
        recording.graph.replay()
        for _ in range(_TIMED):
            began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            began.record()
            recording.graph.replay()
            ended.record()
            ended.synchronize()
            taken.append(began.elapsed_time(ended))
        return statistics.median(taken)
