"""Times calls on a device. On a GPU they are captured in a CUDA graph, so that launches do not count.

Calls go round over several sets of inputs, more than the last cache holds, so that each reads memory; a plain copy is
timed the same way.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

_ROUND_S = 0.05
_COLD_BYTES = 512 << 20
"""Bytes of all sets together: several times the L2 cache of a large GPU."""
_MAX_SETS = 64

Call = Callable[[], object]


class DeviceTimer(ABC):
    """Seconds per call of a list of calls, each on inputs of its own."""

    device: str
    dtype: torch.dtype
    name: str

    @abstractmethod
    def prepare(self, calls: Sequence[Call]) -> Call:
        """Return one call that makes them all."""

    @abstractmethod
    def elapsed_s(self, run: Call, times: int) -> float:
        """Return how long `times` runs take."""

    def sets(self, nbytes: int) -> int:
        """Return how many sets of inputs make every call read memory, given the bytes that one call moves."""
        return max(2, min(_MAX_SETS, -(-_COLD_BYTES // nbytes)))

    def per_call_s(self, run: Call, calls: int) -> float:
        """Return the seconds of one of the `calls` that `run` makes, over about a twentieth of a second."""
        once_s = max(self.elapsed_s(run, 1), 1e-6)
        times = max(1, int(_ROUND_S / once_s))
        return self.elapsed_s(run, times) / times / calls


class CpuTimer(DeviceTimer):
    """Wall-clock time on this process's cores."""

    device = "cpu"
    dtype = torch.float32
    name = "CPU, float32"

    def prepare(self, calls: Sequence[Call]) -> Call:
        """Make the calls one after the other."""

        def run() -> None:
            for call in calls:
                call()

        return run

    def elapsed_s(self, run: Call, times: int) -> float:
        """Time by the monotonic clock."""
        began_s = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - began_s


class CudaTimer(DeviceTimer):
    """Device time between two events."""

    device = "cuda"
    dtype = torch.float16

    def __init__(self) -> None:
        self.name = f"{torch.cuda.get_device_name()}, float16"

    def prepare(self, calls: Sequence[Call]) -> Call:
        """Capture the calls in one CUDA graph, after runs on another stream, as torch asks for."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in (*calls[:2], *calls[:2]):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def elapsed_s(self, run: Call, times: int) -> float:
        """Time by events around the runs."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        began.record()
        for _ in range(times):
            run()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def timer() -> DeviceTimer:
    """Return the GPU's timer if there is a GPU, else the CPU's."""
    return CudaTimer() if torch.cuda.is_available() else CpuTimer()
