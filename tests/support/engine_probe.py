"""Engines whose final latents can be read, and diffusers' pipelines on the same requests, LoRAs and all."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fakes.engine import EveryBatchPays
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest
from support.denoise import edits_of, fused, reference_pipeline, run_pipeline, scheduled

WAIT_S = 120.0


class Probe:
    """An engine whose final latents can be read: images are decoded in the order in which requests end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.batches: list[int] = []
        """How many requests each denoiser call of the latest `latents` held."""
        self.decoded: list[torch.Tensor] = []
        """Final latents since the latest `latents` began, in the order in which they were decoded."""
        denoiser: Any = engine.pool.first.stepper.denoiser
        finish, predict = denoiser.finish, denoiser.predict

        def spy(latents: torch.Tensor) -> torch.Tensor:
            self.decoded.append(latents.clone())
            return finish(latents)

        def count(calls: Any) -> Any:
            if not self.batches:
                self._wait_for_mates(0.0)  # whose calls cannot be shared waits for nobody
            self.batches.append(len(calls))
            return predict(calls)

        denoiser.finish, denoiser.predict = spy, count

    def latents(
        self, *requests: ImageRequest, on_event: Callable[[Event], None] = lambda _: None
    ) -> list[torch.Tensor]:
        """Run all at once (they wait for each other before the first step); latents in request order.

        `on_event` is called on the engine's threads.
        """
        self.decoded.clear()
        self.batches.clear()
        # They wait until the last one's LoRA files are loaded: a full batch ends the waiting.
        rows = sum(one.n * self.engine.pool.first.family.measure(one).rows for one in requests)
        self._wait_for_mates(WAIT_S if len(requests) > 1 else 0.0, largest_batch=rows)
        ended: queue.Queue[tuple[str, Finished | Failed]] = queue.Queue()

        def tell(name: str, event: Event) -> None:
            on_event(event)
            if isinstance(event, Finished | Failed):
                ended.put((name, event))

        for asked in requests:
            self.engine.submit(asked, lambda event, name=asked.request_id: tell(name, event))
        order = [ended.get(timeout=WAIT_S) for _ in requests]
        assert not [event.error for _, event in order if isinstance(event, Failed)]
        found = dict(zip((name for name, _ in order), self.decoded, strict=True))
        return [found[asked.request_id] for asked in requests]

    def _wait_for_mates(self, seconds: float, **more: int) -> None:
        self.engine.reconfigure(self.engine.knobs.model_copy(update={"batch_wait_ms": 1000 * seconds, **more}))


@contextmanager
def probed(**settings: Any) -> Iterator[Probe]:
    """A probe on an engine of these settings in which whoever may share a call does; it is stopped at the end."""
    probe = Probe(build_engine(EngineSettings(**settings), costs=EveryBatchPays()))
    try:
        yield probe
    finally:
        probe.engine.stop(drain_s=0)


def fused_reference(
    folder: Path,
    request: ImageRequest,
    *,
    loras: Path | None = None,
    controlnets: Mapping[str, Path] | None = None,
    dtype: torch.dtype = torch.float32,
    kept: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """Latents of a stock pipeline for the same request. LoRAs are fused: unfused branches round differently.

    `kept`: pipelines of this folder, for later calls with the same ControlNets, LoRAs and kind of edit.
    """
    kept = {} if kept is None else kept
    nets = tuple((controlnets or {})[control.name] for control in request.controlnets)
    key = nets, request.loras, edits_of(request)
    if key not in kept:
        kept[key] = fused(reference_pipeline(folder, None, nets, dtype, edits_of(request)), loras, request)
    with scheduled(kept[key], request.scheduler) as pipe, torch.inference_mode():
        return run_pipeline(pipe, request)
