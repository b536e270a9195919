"""Which thread turns latents into images, and 8-bit RGB."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from plait_kernels.devices import is_gpu
from plait_kernels.heartbeat import ThreadHeartbeat
from plait_kernels.threads import one_thread, set_threads
from plait_serving.diffusion.queue.shares import TurnQueue
from plait_serving.diffusion.values import RgbImage


def to_rgb(images: torch.Tensor) -> tuple[RgbImage, ...]:
    """Convert `float (n, 3, H, W)` in [0, 1] to n `uint8 (H, W, 3)`, rounded like diffusers' image processor."""
    with one_thread():
        array = images.float().clamp(0, 1).permute(0, 2, 3, 1).mul(255).round().to(torch.uint8).cpu().numpy()
    return tuple(array)


class DecodeQueue:
    """Decodes those of a tenant in the order of `submit`, one of each tenant in turn. `submit`, `run_next` and `close`
    are for the compute thread.

    On a CPU that thread decodes, between two steps: a process has one thread with a team of OpenMP workers
    (`plait_kernels.threads`), and one thread beside those of a step would take twice as long and make each of the
    step's operations wait for a core. An accelerator has its own queue, so there a decode thread waits for it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.heartbeat = ThreadHeartbeat(clock)
        """Of the decode thread; a decode on the compute thread is part of that thread's work."""
        self._aside = ThreadPoolExecutor(1, "plait-decode", initializer=set_threads, initargs=(1,))
        self._waiting_here: TurnQueue[Callable[[], None]] = TurnQueue()
        self._waiting_aside: TurnQueue[Callable[[], None]] = TurnQueue()

    def submit(self, tenant: str, latents: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Have `use(latents)` called, which must not raise."""
        if is_gpu(latents.device):
            self._waiting_aside.put(tenant, partial(use, latents))
            self._aside.submit(self._decode_aside)
        else:
            self._waiting_here.put(tenant, partial(use, latents))

    def run_next(self) -> bool:
        """Decode what comes next on this thread; return whether there was anything."""
        return _run_next(self._waiting_here)

    def close(self) -> None:
        """Decode what waits, and return when all is decoded."""
        while self.run_next():
            pass
        self._aside.shutdown()

    def _decode_aside(self) -> None:
        """Decode one. There are as many calls of this as decodes that wait; whose turn it is shows when one begins."""
        self.heartbeat.begin("a decode beside the steps")
        try:
            _run_next(self._waiting_aside)
        finally:
            self.heartbeat.rest()


def _run_next(waiting: TurnQueue[Callable[[], None]]) -> bool:
    taken = waiting.take()
    if taken is not None:
        _, decode = taken
        decode()
    return taken is not None
