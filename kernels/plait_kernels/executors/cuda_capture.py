"""CUDA graphs: `graphs.Capture` on a GPU.

Of each call several forms are captured, which differ in the attention kernel that torch prefers, and the fastest
replay is kept: which kernel wins depends on the shape and the card.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_log = logging.getLogger(__name__)

_FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PREFERRED = {"flash": _FLASH, "cudnn": [SDPBackend.CUDNN_ATTENTION, *_FLASH]}
"""Attention kernels in order of preference: those after the first take what it cannot."""

_WARM_UPS, _TIMED = 2, 3


class CudaCapture:
    """Captures calls on one device; the graphs share a pool of memory, so they must be replayed on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device)
        self._pool: Any = None
        self._live: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool_bytes = 0

    @property
    def pool_bytes(self) -> int:
        """What the graphs share."""
        return self._pool_bytes if self._live else 0

    def __call__(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture every form and return the fastest. Raises RuntimeError if none can be captured."""
        found: dict[str, tuple[float, torch.cuda.CUDAGraph]] = {}
        failure: RuntimeError | None = None
        for name, backends in _PREFERRED.items():
            try:
                with sdpa_kernel(backends, set_priority=True):
                    recording = self._captured(call)
                found[name] = self._replay_ms(recording), recording
            except RuntimeError as error:
                failure = error
        if not found:
            raise failure or RuntimeError("no form was captured")
        best = min(found, key=lambda name: found[name][0])
        _log.info("captured %s; kept %s", ", ".join(f"{name} {ms:.2f} ms" for name, (ms, _) in found.items()), best)
        return found[best][1]

    def _captured(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Make the call until libraries have chosen their kernels, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        if not self._live:  # a pool that no graph uses any more takes none
            self._pool, self._pool_bytes = torch.cuda.graph_pool_handle(), 0
        before_bytes = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on using the device (decoding, loading) while this one captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        self._pool_bytes += max(0, torch.cuda.memory_reserved(self._device) - before_bytes)
        self._live.add(graph)
        return graph

    def _replay_ms(self, recording: torch.cuda.CUDAGraph) -> float:
        """Return the median milliseconds of a replay."""
        cuda: Any = torch.cuda
        taken: list[float] = []
        recording.replay()
        for _ in range(_TIMED):
            began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            began.record()
            recording.replay()
            ended.record()
            ended.synchronize()
            taken.append(began.elapsed_time(ended))
        return statistics.median(taken)
