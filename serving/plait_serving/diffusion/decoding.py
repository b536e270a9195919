"""Latents to images: decode, safety check, 8-bit RGB; and which thread does it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from plait_kernels.devices import is_gpu
from plait_kernels.heartbeat import ThreadHeartbeat
from plait_kernels.threads import one_thread
from plait_serving.diffusion.protocols import Denoiser
from plait_serving.diffusion.queue.costs import MAX_KINDS
from plait_serving.diffusion.queue.turns import TurnQueue
from plait_serving.diffusion.values import RgbImage

LONG_DECODE_S = 0.1
"""From here on a decode gains more from all cores than steps gain from running beside it: Stable Diffusion 1.5 decodes
256x256 in 2.6 to 3 s on two cores; the starter model takes 5 ms on one."""


def decoded(denoiser: Denoiser, latents: torch.Tensor) -> tuple[tuple[RgbImage, ...], tuple[bool, ...]]:
    """Decode `(n, c, h, w)` to n images and their safety flags, on whatever thread calls it."""
    with torch.inference_mode():
        images = denoiser.finish(latents)
        flagged = (False,) * len(images)
        if denoiser.safety is not None:
            images, flagged = denoiser.safety.check(images)
        return to_rgb(images), flagged


def to_rgb(images: torch.Tensor) -> tuple[RgbImage, ...]:
    """Convert `float (n, 3, H, W)` in [0, 1] to n `uint8 (H, W, 3)`, rounded like diffusers' image processor."""
    with one_thread():
        array = images.float().clamp(0, 1).permute(0, 2, 3, 1).mul(255).round().to(torch.uint8).cpu().numpy()
    return tuple(array)


def decodes_here(*, on_cpu: bool, stepping: bool, expected_s: float | None) -> bool:
    """Return whether the compute thread decodes, with all its threads, instead of the decode thread with one.

    It does if it has nothing to step, and between two steps if the decode is long (or unknown: `expected_s` None): one
    thread beside those of a step would take twice as long and make each of the step's operations wait for a core. An
    accelerator has its own queue, so there the decode thread waits for it.
    """
    return on_cpu and (not stepping or expected_s is None or expected_s >= LONG_DECODE_S)


class DecodeQueue:
    """Decodes those of a tenant in the order of `submit`, one of each tenant in turn, each where `decodes_here` says.
    All methods are for the compute thread.

    A process has one thread with a team of OpenMP workers (`plait_kernels.threads`): the compute thread. So a decode
    that is to use all cores runs there, not with more threads elsewhere.
    """

    def __init__(self, *, set_threads: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.heartbeat = ThreadHeartbeat(clock)
        """Of the decode thread; a decode on the compute thread is part of that thread's work."""
        self._aside = ThreadPoolExecutor(1, "plait-decode", initializer=set_threads, initargs=(1,))
        self._last_aside: Future[None] | None = None
        self._waiting: TurnQueue[_Decode] = TurnQueue()
        self._waiting_aside: TurnQueue[_Decode] = TurnQueue()
        self._seconds: dict[int, float] = {}
        """Of the last decode here, by number of latent values."""

    def submit(self, tenant: str, latents: torch.Tensor, use: Callable[[torch.Tensor], bool]) -> None:
        """Have `use(latents)` called, which returns whether it had to decode them, and must not raise."""
        self._waiting.put(tenant, _Decode(latents, use))

    def run_next(self, *, stepping: bool) -> bool:
        """Start what waits, up to the first that is decoded here; return whether there was one."""
        while (taken := self._waiting.take()) is not None:
            tenant, decode = taken
            size, on_cpu = decode.latents.numel(), not is_gpu(decode.latents.device)
            if not decodes_here(on_cpu=on_cpu, stepping=stepping, expected_s=self._seconds.get(size)):
                self._waiting_aside.put(tenant, decode)
                self._last_aside = self._aside.submit(self._use_next_aside)
                continue
            if self._last_aside is not None:
                self._last_aside.result()  # a request's preview comes before its images
                self._last_aside = None
            started_s = self._clock()
            if decode.use(decode.latents):
                self._seconds.pop(size, None)
                self._seconds[size] = self._clock() - started_s
                if len(self._seconds) > MAX_KINDS:
                    del self._seconds[next(iter(self._seconds))]
            return True
        return False

    def close(self) -> None:
        """Decode what waits, and return when all is decoded."""
        while self.run_next(stepping=False):
            pass
        self._aside.shutdown()

    def _use_next_aside(self) -> None:
        """Decode one. There are as many calls of this as decodes that wait; whose turn it is shows when one begins."""
        taken = self._waiting_aside.take()
        assert taken is not None
        _, decode = taken
        self.heartbeat.begin("a decode beside the steps")
        try:
            decode.use(decode.latents)
        finally:
            self.heartbeat.rest()


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    latents: torch.Tensor
    use: Callable[[torch.Tensor], bool]
