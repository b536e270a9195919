"""The diffusion engine in this process, built as the server builds it, under a closed loop of callers."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from plait_autoconfig.knobs import ChoiceKnob
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, TrialOutcome
from plait_bench.cells.values import CellSubject, CellWorkload, outcome_of
from plait_bench.errors import SystemFailed
from plait_bench.images.models import open_models
from plait_bench.images.requests import image_request
from plait_bench.images.workloads import CONTROLNETS, LORA_SETS, PROMPTS, SCHEDULERS, ImageSpec
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.knobs import EngineKnobs, Exact, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest
from plait_serving.images.config import STARTER_FOLDER

__all__ = ["EngineWorkload"]

_TIMEOUT_S, _PREPARED_S = 120.0, 180.0

SPACE = Space(
    (
        ChoiceKnob(name="largest_batch", values=(1, 4, 8, 16), ordered=True, unit="images"),
        ChoiceKnob(name="batch_wait_ms", values=(0.0, 10.0, 50.0), ordered=True, unit="ms"),
        ChoiceKnob(name="threads", values=(1, 2), ordered=True, unit="cores"),
        ChoiceKnob(name="exact", values=("never", "always")),
        ChoiceKnob(name="placement", values=("local",)),
    )
)
"""The space of 48 cells. Without Serve, ControlNets have only one placement; it is a knob because other services
have more."""

SETS = {
    "largest_batch": "engine.largest_batch", "batch_wait_ms": "engine.batch_wait_ms", "threads": "engine.threads",
    "exact": "engine.exact", "placement": "engine.controlnet_placement",
}  # fmt: skip
"""What its knobs set in a served engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorkload(CellWorkload):
    """`callers` ask for `images` in all. `loras`: LoRA sets in the mix (0: none); `controlled`: the share of images
    with a ControlNet, in quarters."""

    callers: int
    images: int
    steps: int
    loras: int = 0
    controlled: int = 0

    @contextmanager
    def open(self) -> Iterator[CellSubject]:
        """Build the engine over the starter models, and wait until it runs on what it converts behind its first images;
        stop it at the end."""
        names = frozenset(name for loras in LORA_SETS for name, _ in loras)
        models = open_models(STARTER_FOLDER, controlnets=frozenset(CONTROLNETS), loras=names)
        assembled = build_engine(
            EngineSettings(
                model=models.base,
                dtype="float32",
                device="cpu",
                lora_source=FolderSource(next(iter(models.loras.values())).parent),
                controlnets=models.controlnets,
                knobs=EngineKnobs(controlnet_placement=Placement.LOCAL),
            )
        )
        try:
            subject = _EngineSubject(self, assembled.engine, assembled.bundle.width, assembled.bundle.height)
            subject.warm_up()
            until_s = time.monotonic() + _PREPARED_S
            while not assembled.prepared_parts() >= {"unet", "vae"} and time.monotonic() < until_s:
                time.sleep(0.5)
            subject.warm_up()
            yield subject
        finally:
            assembled.engine.stop(drain_s=0.0)

    def orders(self, seed: int) -> list[ImageSpec]:
        """Make the same image orders for every configuration; the steps vary around the mean, as users' do."""
        return [
            ImageSpec(
                prompt=PROMPTS[i % len(PROMPTS)],
                seed=1000 * seed + i,
                steps=self.steps + (-1, 0, 1, 0)[i % 4],
                scheduler=SCHEDULERS[i % len(SCHEDULERS)],
                loras=LORA_SETS[i % self.loras] if self.loras else (),
                control=(CONTROLNETS[i % 2], i) if i % 4 < self.controlled else None,
            )
            for i in range(self.images)
        ]


class _EngineSubject:
    def __init__(self, workload: EngineWorkload, engine: Engine, width: int, height: int) -> None:
        self._workload = workload
        self._engine = engine
        self._size = width, height
        self._numbers = count()
        self._threads = 0

    def warm_up(self) -> None:
        """Touch all that the load touches."""
        self._loop([self._request(order) for order in self._workload.orders(0)])

    def measure(self, config: Config, *, seed: int) -> TrialOutcome:
        """Apply the knobs, warm up, and measure one closed loop. Paid is the processor time that this process used.

        The first images warm up: a change of knobs may start threads, merge LoRAs anew, or compile for new shapes.
        """
        given: dict[str, Any] = dict(config)
        placement = Placement(given.pop("placement"))
        knobs = EngineKnobs(controlnet_placement=placement, **{**given, "exact": Exact(given["exact"])})
        self._engine.reconfigure(knobs)
        if given["threads"] != self._threads:  # which compiles anew
            self._threads = given["threads"]
            self.warm_up()
        self._loop([self._request(order) for order in self._workload.orders(seed)[: self._workload.callers]])
        requests = [self._request(order) for order in self._workload.orders(seed)]
        started_s, used_s = time.monotonic(), time.process_time()
        latencies_ms = self._loop(requests)
        wall_s, used_s = time.monotonic() - started_s, time.process_time() - used_s
        return outcome_of(latencies_ms, wall_s, slo_ms=self._workload.slo_ms, cores=used_s / wall_s)

    def _loop(self, requests: Sequence[ImageRequest]) -> list[float]:
        """Run the closed loop: each caller asks for its next image once it has one. Returns latencies in
        milliseconds."""
        done: queue.SimpleQueue[tuple[float, Failed | Finished]] = queue.SimpleQueue()
        waiting = list(reversed(requests))
        latencies_ms: list[float] = []

        def ask() -> None:
            asked_s = time.monotonic()

            def sink(event: Event) -> None:
                if isinstance(event, Finished | Failed):
                    done.put((time.monotonic() - asked_s, event))

            self._engine.submit(waiting.pop(), sink)

        for _ in range(min(self._workload.callers, len(requests))):
            ask()
        while len(latencies_ms) < len(requests):
            taken_s, event = done.get(timeout=_TIMEOUT_S)
            if isinstance(event, Failed):
                raise SystemFailed(f"an image failed: {event.error}") from event.error
            latencies_ms.append(taken_s * 1e3)
            if waiting:
                ask()
        return latencies_ms

    def _request(self, order: ImageSpec) -> ImageRequest:
        width, height = self._size
        return image_request(order, request_id=f"cell-{next(self._numbers)}", width=width, height=height)
