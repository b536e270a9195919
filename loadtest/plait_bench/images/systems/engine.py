"""Our engine inside a worker process: built like the server's, without Ray and HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from plait_bench.errors import BenchError
from plait_bench.fleet.values import Item, ItemOutcome
from plait_bench.images.models import ModelFolder
from plait_bench.images.pixels import encode
from plait_bench.images.requests import image_request
from plait_bench.images.sizes import DeviceName, DTypeName
from plait_bench.images.workloads import ImageSpec
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest

# No image of these workloads takes longer on anything that is worth a measurement.
_TIMEOUT_S = 1800.0


class InProcessEngine:
    """A `FleetWorker` over our engine with its default knobs."""

    def __init__(self, models: ModelFolder, *, dtype: DTypeName, device: DeviceName) -> None:
        self._assembled = build_engine(
            EngineSettings(
                model=models.base,
                dtype=dtype,
                device=device,
                lora_source=FolderSource(models.lora_folder),
                controlnets=models.controlnets,
            )
        )
        self._count = 0

    def configure(self, *, threads: int, variant: str) -> None:
        """Do nothing: the engine uses the host as it sees fit."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[ItemOutcome]:
        """Submit the items all at once, or one after the other."""
        requests = [self._request(ImageSpec.from_json(item)) for item in items]
        waves = [[request] for request in requests] if one_by_one else [requests]
        return [outcome for wave in waves for outcome in self._run_wave(wave, keep)]

    def close(self) -> None:
        """Stop the engine."""
        self._assembled.engine.stop(drain_s=0.0)

    def _run_wave(self, requests: Sequence[ImageRequest], keep: bool) -> list[ItemOutcome]:
        sinks = [_Sink() for _ in requests]
        for request, sink in zip(requests, sinks, strict=True):
            self._assembled.engine.submit(request, sink)
        return [sink.outcome(keep) for sink in sinks]

    def _request(self, order: ImageSpec) -> ImageRequest:
        self._count += 1
        bundle = self._assembled.bundle
        width, height = (order.edge, order.edge) if order.edge else (bundle.width, bundle.height)
        return image_request(order, request_id=f"bench-{self._count}", width=width, height=height)


class _Sink:
    """One request's last event, and its time."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._last: Finished | Failed | None = None
        self._at_s = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            self._at_s = time.monotonic()
            self._last = event
            self._done.set()

    def outcome(self, keep: bool) -> ItemOutcome:
        """Wait for the end of the request. Raises `BenchError` if it failed or timed out."""
        if not self._done.wait(_TIMEOUT_S):
            raise BenchError(f"a request took longer than {_TIMEOUT_S:.0f} s")
        if isinstance(self._last, Failed):
            raise BenchError(f"a request failed: {self._last.error}") from self._last.error
        assert isinstance(self._last, Finished)
        image = self._last.result.images[0]
        return ItemOutcome(finished_s=self._at_s, result=encode(image) if keep else None)
