"""A deterministic `ImageService` without torch, for tests and for trying clients; it passes the real one's tests."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

import numpy as np

from fakes.terms import ALL_TERMS
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.values import (
    Event,
    Failed,
    Finished,
    ImageRequest,
    ImageResult,
    Preview,
    Progress,
    RgbImage,
    Scheduler,
    Timings,
)
from plait_serving.health import Health
from plait_serving.images.service import BaseModelCard, Catalog, ControlNetCard, LoraCard
from plait_serving.replica_metrics import ReplicaMetrics, family, this_process

FAKE_CATALOG = Catalog(
    models=(
        BaseModelCard(
            name="emoji",
            family="sd1",
            default_width=16,
            default_height=16,
            default_steps=4,
            terms=ALL_TERMS,
            limits=ImageLimits(
                size_multiple=8,
                min_edge_px=8,
                max_edge_px=128,
                max_pixels=64 * 64,
                max_steps=50,
                max_loras=8,
                max_controlnets=4,
            ),
        ),
    ),
    loras=(
        LoraCard(name="noto", family="sd1", format="peft"),
        LoraCard(name="sketch", family="sd1", format="kohya"),
    ),
    controlnets=(
        ControlNetCard(name="edges", family="sd1", preprocessor="edges"),
        ControlNetCard(name="plain", family="sd1"),
    ),
)

FAKE_REQUEST = ImageRequest(
    request_id="r", prompt="x", width=16, height=16, steps=4, guidance_scale=7.5, seed=1, scheduler=Scheduler.EULER,
    partial_images=1,
)  # fmt: skip


def fake_image(request: ImageRequest, seed: int) -> RgbImage:
    """Return an image that depends on everything in the request that should change an image."""
    loras = [(ref.name, ref.scale) for ref in request.loras]
    controls = [
        (ref.name, ref.scale, ref.start, ref.end, zlib.crc32(ref.image.tobytes())) for ref in request.controlnets
    ]
    facts = (
        request.prompt,
        request.negative_prompt,
        request.steps,
        request.guidance_scale,
        request.scheduler,
        loras,
        controls,
        _edit_facts(request),
    )
    rng = np.random.default_rng([zlib.crc32(repr(facts).encode()), seed])
    return rng.integers(0, 256, (request.height, request.width, 3), dtype=np.uint8)


def _edit_facts(request: ImageRequest) -> tuple[float | int, ...]:
    if request.edit is None:
        return ()
    edit = request.edit
    mask = 0 if edit.mask is None else zlib.crc32(edit.mask.tobytes())
    return edit.strength, edit.overlay, zlib.crc32(edit.image.tobytes()), mask


class FakeImageService:
    """Makes `fake_image` in `steps` steps of `step_s` seconds, or what `slow` says of the prompt.

    A prompt in `failures` fails with that error after `fail_at_step` steps. `submitted`, `finished` and `cancelled`
    record request ids; `steps_run` shows how soon a cancelled request stopped.
    """

    def __init__(
        self,
        *,
        catalog: Catalog = FAKE_CATALOG,
        failures: Mapping[str, Exception] | None = None,
        fail_at_step: int = 0,
        step_s: float = 0.0,
        slow: Mapping[str, float] | None = None,
        health: Health | None = None,
    ) -> None:
        self.submitted: list[ImageRequest] = []
        self.finished: list[str] = []
        self.cancelled: list[str] = []
        self.asleep: set[str] = set()
        self.steps_run = 0
        self._images = Counter[str]()
        self.state = health or Health(ready=True, warmup_s=0.25)
        self.offers = catalog
        self._failures = dict(failures or {})
        self._fail_at_step = fail_at_step
        self.step_s = step_s
        self._slow = dict(slow or {})

    async def catalog(self, *, anew: bool = False) -> Catalog:
        """Return the fixed catalog."""
        return self.offers

    async def rest(self, model: str, *, asleep: bool) -> None:
        """Record it in `asleep`."""
        (self.asleep.add if asleep else self.asleep.discard)(model)

    async def health(self) -> Health:
        """Return the fixed health."""
        return self.state

    async def counts(self) -> list[ReplicaMetrics]:
        """Return the number of steps, the models, and each tenant's images."""
        models = {(model.name,): 1.0 for model in self.offers.models}
        families = [
            family("fake_steps_total", "Steps that were run", self.steps_run),
            family("plait_model_resident", "1: the base model is in memory", models, "model"),
        ]
        me = this_process()
        account = {(me, tenant, "images"): count for tenant, count in self._images.items()}
        return [ReplicaMetrics(replica=me, families=families, account=account)]

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of a request made with `fake_image`."""
        self.submitted.append(request)
        ended = False
        try:
            async for event in self._events(request):
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            (self.finished if ended else self.cancelled).append(request.request_id)

    async def _events(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        error = self._failures.get(request.prompt)
        previews = [
            round((i + 1) * request.run_steps / (request.partial_images + 1)) for i in range(request.partial_images)
        ]
        for step in range(request.run_steps):
            if error is not None and step == self._fail_at_step:
                yield Failed(error=error)
                return
            await asyncio.sleep(self._slow.get(request.prompt, self.step_s))
            self.steps_run += 1
            yield Progress(step=step + 1, steps=request.run_steps)
            if step + 1 in previews:
                image = fake_image(request, request.seed + step + 1)
                yield Preview(index=previews.index(step + 1), step=step + 1, image=image)
        self._images[request.tenant.name] += request.n
        yield Finished(result=fake_result(request))


def fake_result(request: ImageRequest) -> ImageResult:
    """Return a finished request with fixed timings."""
    return ImageResult(
        request_id=request.request_id,
        images=tuple(fake_image(request, seed) for seed in request.seeds),
        seeds=request.seeds,
        flagged=(False,) * request.n,
        lora_policy=request.lora_policy,
        lora_free_steps=request.lora_free_steps,
        timings=Timings(queue_s=0.125, lora_s=0.25, encode_s=0.5, denoise_s=1.0, decode_s=0.0625, total_s=1.9375),
    )
