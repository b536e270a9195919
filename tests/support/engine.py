"""An engine over fakes, for tests of its loop: a gate that stops it between steps, and watches of its requests."""

from __future__ import annotations

import threading
import time

import pytest

from fakes.engine import (
    EveryBatchPays,
    FakeDenoiser,
    FakeMerger,
    FakeProvider,
    resident_model,
)
from plait_serving.deployments.images.hosted import HostedImages
from plait_serving.deployments.images.lora_cards import LoraCards
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.lora.source import NoLoras
from plait_serving.diffusion.values import Failed, Finished, ImageRequest, Scheduler
from plait_serving.images.config import ImagesSection
from plait_serving.images.service import Catalog

WAIT_S = 120.0


class Gate:
    """Stops the compute thread before each denoiser call until the test lets it pass."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.open = False

    def __call__(self) -> None:
        if self.open:
            return
        self.arrived.release()
        assert self.passes.acquire(timeout=WAIT_S), "the test never let the step pass"

    def wait_step(self) -> None:
        """Blocks until the compute thread stands at a step boundary."""
        assert self.arrived.acquire(timeout=WAIT_S), "no step began"

    def let(self, steps: int = 1) -> None:
        """Lets that many steps run and waits for the next boundary after each."""
        for _ in range(steps):
            self.passes.release()
            self.wait_step()

    def release_all(self) -> None:
        """From now on nothing stops."""
        self.open = True
        for _ in range(1000):
            self.passes.release()


class Rig:
    """An engine over fakes and the sinks of its requests. Whoever may share a call does."""

    def __init__(
        self, *, gate=None, provider=None, broken=frozenset(), clock=time.monotonic, costs=None, **knobs
    ) -> None:
        self.merger, self.text_merger = FakeMerger(broken=broken), FakeMerger()
        self.denoiser = FakeDenoiser(self.merger, self.text_merger, gate)
        self.provider = provider or FakeProvider(["a", "b"])
        self.engine = Engine(
            models=[resident_model(self.denoiser, clock=clock, loras=self.provider, costs=costs or EveryBatchPays())],
            knobs=EngineKnobs(threads=1, **knobs),
            clock=clock,
        )
        self.engine.start()

    def ask(self, prompt="x", **more):
        """Submits and returns a `Watch`."""
        return Watch(self.engine, request(prompt, **more))


class LocalImages(HostedImages):
    """The service over an engine of fakes, which offers what it is given."""

    def __init__(self, engine: Engine, offers: Catalog) -> None:
        super().__init__(ImagesSection(), engine, LoraCards(NoLoras(), lambda: "sd1"))
        self._offers = offers

    def _catalog(self) -> Catalog:
        return self._offers


class Watch:
    """A submitted request and what it was told."""

    def __init__(self, engine, asked) -> None:
        self.events = []
        self.ended = threading.Event()
        self.cancel = engine.submit(asked, self._sink)

    def _sink(self, event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self.ended.set()

    def end(self):
        """Its last event."""
        assert self.ended.wait(WAIT_S), "the request never ended"
        return self.events[-1]

    def result(self):
        """The result, or raises the failure."""
        last = self.end()
        if isinstance(last, Failed):
            raise last.error
        return last.result


def request(prompt="x", **more) -> ImageRequest:
    """A small request with defaults."""
    fields = {
        "request_id": f"r-{prompt}", "width": 16, "height": 16, "steps": 4, "guidance_scale": 3.0, "seed": 10,
        "scheduler": Scheduler.DDIM, **more,
    }  # fmt: skip
    return ImageRequest(prompt=prompt, **fields)


@pytest.fixture
def rig():
    """`rig(**options)` builds a `Rig`; every one is stopped at the end."""
    made = []

    def build(**options):
        made.append((Rig(**options), options.get("gate")))
        return made[-1][0]

    yield build
    for built, gate in made:
        if isinstance(gate, Gate):
            gate.release_all()
        built.engine.stop(drain_s=0)
