"""What guidance and the scheduler's update take of a denoising step: the starter's UNet on the default executor.

At 16x16 latents, the starter's own, and at 64x64, those of Stable Diffusion 1.5 at 512x512, whose UNet is a hundred
times larger: there the share is a bound from above.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from plait_bench.benchmark import Metric, Reading, Subject, Workload
from plait_bench.errors import SystemUnavailable

__all__ = ["GuidedUpdate"]

_STEPS = 20
_SCALE = 5.0


class GuidedUpdate(Workload):
    """DDIM, the starter's default; one guided image, so two rows."""

    systems = ("plait",)
    metrics: Mapping[str, Metric] = {
        "time_us": Metric(unit="us", better="lower"),
        "share_of_step": Metric(unit="share", better="lower"),
    }
    ours = "plait"

    def __init__(self, edge: int) -> None:
        self._edge = edge
        self.name = f"guided-update-{edge}x{edge}"

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Load the starter's model and prepare it like the server does."""
        del system, layout
        try:
            from plait_serving.diffusion.bundle import load_bundle
            from plait_serving.diffusion.denoisers.unet import UNetDenoiser
            from plait_serving.diffusion.knobs import Exact, ExecutorName
            from plait_serving.diffusion.preparation import preparer_for
            from plait_serving.starter.manifest import WEIGHTS
        except ImportError as error:
            raise SystemUnavailable(f"plait's engine: {error}") from error
        folder = WEIGHTS / "emoji"
        bundle = load_bundle(folder, dtype=torch.float32, device="cpu", safety_checker=False)
        denoiser = UNetDenoiser(bundle, exact=lambda: Exact.NEVER)
        with tempfile.TemporaryDirectory() as prepared, torch.inference_mode():
            preparer = preparer_for(
                ExecutorName.AUTO, device="cpu", dtype=torch.float32, threads=torch.get_num_threads,
                cache=Path(prepared),
            )  # fmt: skip
            if preparer is not None:
                with torch.inference_mode(mode=False):
                    denoiser.adopt(preparer.make_unet(folder / "unet"))
            yield _Steps(denoiser, bundle.scheduler_config, self._edge)


class _Steps:
    """A request's steps, timed in parts."""

    def __init__(self, denoiser: Any, config: Any, edge: int) -> None:
        from plait_serving.diffusion.protocols import StepCall
        from plait_serving.diffusion.values import ImageRequest, Scheduler

        self._denoiser, self._config, self._edge = denoiser, config, edge
        self._kind, self._call = Scheduler.DDIM, StepCall
        self._conditioning = denoiser.prepare(
            ImageRequest(
                request_id="bench", prompt="a red apple", width=8 * edge, height=8 * edge, steps=_STEPS,
                guidance_scale=_SCALE, seed=0, scheduler=self._kind,
            )
        )  # fmt: skip

    def warm_up(self) -> None:
        """Run a request; programs compile for its shape."""
        for _ in range(3):
            self._request()

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Return what guiding, checking and updating take in a step, and their share of it."""
        pairs = [pair for _ in range(3) for pair in self._request()]
        update_s, step_s = (median(part) for part in zip(*pairs, strict=True))
        return [
            Reading(metric="time_us", value=update_s * 1e6),
            Reading(metric="share_of_step", value=update_s / step_s),
        ]

    def _request(self) -> list[tuple[float, float]]:
        """Take all steps; return for each the seconds of guidance and update, and of all of it."""
        from plait_serving.diffusion.denoisers.batch import BatchLayout
        from plait_serving.diffusion.denoisers.unet import split_output
        from plait_serving.diffusion.samplers import Sampler
        from plait_serving.diffusion.stepper import advance

        sampler = Sampler(self._kind, self._config, steps=_STEPS, seeds=[1], shape=(4, self._edge, self._edge))
        latents, found = sampler.init_latents(), []
        layout = BatchLayout.of([self._conditioning])
        for step in range(_STEPS):
            began_s = time.perf_counter()
            call = self._call(
                conditioning=self._conditioning, sample=sampler.scale_input(latents, step),
                timestep=sampler.timesteps[step], guidance_scale=_SCALE, controls=(),
            )  # fmt: skip
            (output,) = self._denoiser.predict([call])
            predicted_s = time.perf_counter()
            advanced = advance(sampler, output, step, latents)
            assert advanced is not None
            ended_s = time.perf_counter()
            rows = torch.cat([output, output])
            guiding_s = time.perf_counter()
            split_output(rows, [call], layout, [None])  # once more, alone: `predict` does it last
            again_s = time.perf_counter() - guiding_s
            latents = advanced
            found.append((ended_s - predicted_s + again_s, ended_s - began_s))
        return found
