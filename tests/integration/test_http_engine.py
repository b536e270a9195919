"""HTTP over the real engine, whose models are arithmetic fakes: what the two promise each other."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from fakes.engine import FakeDenoiser, FakeMerger, FakeProvider, fake_samplers, resident_model
from fakes.images import FAKE_CATALOG
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.families.unet.samplers import sampler_of
from plait_serving.diffusion.families.unet.scheduler import SchedulerConfig
from plait_serving.diffusion.knobs import EngineKnobs
from support.engine import LocalImages
from support.http_app import AsgiCall, b64, make_app, pixels, png, saved
from support.waiting import until

torch.set_num_threads(1)
STEP_S = 0.01


class Rig:
    """The application, the service and the engine under it. The image of a seed is grey: seed + steps."""

    def __init__(self, *, provider=None, samplers=fake_samplers, **knobs) -> None:
        self.merger = FakeMerger(cost_s=0.0)
        self.text_merger = FakeMerger()
        self.denoiser = FakeDenoiser(self.merger, self.text_merger, lambda: time.sleep(STEP_S), samplers=samplers)
        self.provider = provider or FakeProvider(["noto", "sketch"])
        limits = ImageLimits(max_edge_px=512, max_pixels=64 * 64, max_steps=500)
        self.engine = Engine(
            models=[resident_model(self.denoiser, clock=time.monotonic, loras=self.provider, limits=limits)],
            knobs=EngineKnobs(threads=1, **knobs),
            clock=time.monotonic,
        )
        self.engine.start()
        card = replace(FAKE_CATALOG.model, name="fake", limits=limits)
        catalog = replace(FAKE_CATALOG, models=(card,), controlnets=())
        self.service = LocalImages(self.engine, catalog)
        self.app = make_app(self.service)

    def call(self, **body) -> AsgiCall:
        """Starts a request: an edit if it has an image."""
        path = "/v1/images/edits" if "image" in body else "/v1/images/generations"
        return AsgiCall(self.app, json.dumps({"prompt": "x", "guidance_scale": 1, **body}).encode(), path=path)

    async def answer(self, **body) -> tuple[int, dict]:
        """A request's status and body."""
        call = self.call(**body)
        await call.done()
        return call.status, json.loads(b"".join(call.chunks))


@pytest.fixture
def rig():
    """`rig(**options)` builds a `Rig`; every one is stopped at the end."""
    rigs = []

    def build(**options):
        rigs.append(Rig(**options))
        return rigs[-1]

    yield build
    for each in rigs:
        each.engine.stop(drain_s=0)


def grey(body, index=0):
    """The one value of a grey image."""
    image = pixels(body["data"][index]["b64_json"])
    assert (image == image[0, 0]).all()
    return int(image[0, 0, 0])


async def test_pictures_come_out_as_the_engine_made_them(rig):
    """Seeds, steps and LoRA scales of the request are those of the image; timings are the engine's."""
    subject = rig()
    status, body = await subject.answer(n=2, seed=10, num_inference_steps=5)
    assert status == 200
    assert [grey(body, 0), grey(body, 1)] == [15, 16]
    status, body = await subject.answer(seed=10, num_inference_steps=5, loras=[{"name": "noto", "scale": 2}])
    assert grey(body) == 10 + 5 * 3
    timings = body["timings"]
    assert timings["denoise"] >= 5 * STEP_S
    assert timings["total"] == pytest.approx(sum(timings[key] for key in timings if key != "total"), abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_stops_the_engine_within_a_step(rig, stream):
    """After the client has gone, the compute thread runs at most one more step of its image."""
    subject = rig()
    call = subject.call(num_inference_steps=500, stream=stream)
    await until(lambda: len(subject.denoiser.calls) >= 3)
    call.disconnect()
    await call.done()
    before = len(subject.denoiser.calls)
    await until(lambda: subject.engine.statistics().cancelled == 1)
    await asyncio.sleep(10 * STEP_S)
    assert len(subject.denoiser.calls) <= before + 1


async def test_a_disconnect_while_the_lora_loads_gives_it_up(rig):
    """A request that waits for its LoRA set is cancelled without ever running."""
    subject = rig(provider=FakeProvider(["noto"], held=["noto"]))
    call = subject.call(loras=[{"name": "noto"}])
    await until(lambda: bool(subject.provider.waiting))
    call.disconnect()
    await call.done()
    await until(lambda: subject.engine.statistics().cancelled == 1)
    assert subject.denoiser.calls == []


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"prompt": "nan"}, 500, "numerical_error"),
        ({"prompt": "boom", "size": "24x16"}, 500, "internal_error"),
        ({"prompt": "unencodable"}, 500, "internal_error"),
        ({"num_inference_steps": 501}, 400, "invalid_value"),
        ({"size": "72x64"}, 400, "invalid_value"),
        ({"deadline_ms": 1, "num_inference_steps": 100}, 504, "deadline_missed"),
    ],
    ids=lambda value: json.dumps(value),
)
async def test_failures_of_the_engine_are_told_and_others_go_on(rig, body, status, code):
    """The failing request gets its answer, a neighbour gets its image."""
    subject = rig()
    await subject.answer()  # the engine knows by now how long a step takes
    neighbour = subject.call(seed=1, num_inference_steps=30)
    got, error = await subject.answer(**body)
    assert (got, error["error"]["code"]) == (status, code)
    await neighbour.done()
    assert grey(json.loads(b"".join(neighbour.chunks))) == 31


async def test_an_edit_starts_from_its_image_and_is_counted(rig):
    """The arithmetic denoiser adds 1 per step: the image, its noise (the seed) and the steps that run; outside the
    mask the image; usage counts the steps that ran."""
    made = rig()
    encoded = b64(png(colour=(40, 40, 40)))
    status, body = await made.answer(image=encoded, seed=3, num_inference_steps=10, strength=0.5, size="16x16")
    assert status == 200, body
    assert set(pixels(body["data"][0]["b64_json"]).reshape(-1)) == {40 + 3 + 5}
    mask = np.zeros((16, 16), np.uint8)
    mask[:, :8] = 255
    masked = b64(saved(Image.fromarray(mask)))
    status, body = await made.answer(
        image=encoded, mask=masked, seed=3, num_inference_steps=10, strength=0.5, size="16x16"
    )
    assert status == 200, body
    found = pixels(body["data"][0]["b64_json"])
    assert set(found[:, :8].reshape(-1)) == {40 + 3 + 5}
    assert set(found[:, 8:].reshape(-1)) == {40}
    used = made.engine.usage()["default"]
    assert (used.images, used.steps) == (2, 10)


async def test_an_image_is_encoded_between_steps_of_others(rig):
    """While one request steps, the images of four edits are encoded one after the other, never two in a row once the
    time of a turn is over."""
    made = rig(largest_batch=16)
    order, submitted = [], []
    encode, predict, submit = made.denoiser.encode, made.denoiser.predict, made.engine.submit

    def counted(request, sink):
        ticket = submit(request, sink)
        submitted.append(request)
        return ticket

    def slow(image):
        order.append("encode")
        time.sleep(0.3)
        return encode(image)

    def step(calls):
        order.append("step")
        while len(submitted) < 5:  # what is running does not end before the others have come
            time.sleep(0.001)
        return predict(calls)

    made.engine.submit = counted
    made.denoiser.encode, made.denoiser.predict = slow, step
    running = made.call(num_inference_steps=400, size="16x16", seed=1)
    await until(lambda: "step" in order)
    encoded = b64(png(colour=(40, 40, 40)))
    answers = await asyncio.gather(
        *(made.answer(image=encoded, seed=i, num_inference_steps=4, size="16x16") for i in range(4))
    )
    assert [status for status, _ in answers] == [200] * 4
    first, last = order.index("encode"), len(order) - order[::-1].index("encode")
    assert "encodeencode" not in "".join(order[first:last])
    running.disconnect()


@pytest.mark.parametrize("fields", [{}, {"sigmas": "karras"}])
def test_a_sampler_that_can_not_step_with_the_model_is_a_400(rig, fields):
    """Its last step would divide by zero; other samplers make images of the same model."""
    config = SchedulerConfig(written={"lower_order_final": False, "use_karras_sigmas": True})

    def samplers(request, seeds, shape):
        return sampler_of(config, request, seeds, shape=shape)

    async def ask():
        own = rig(samplers=samplers)
        return [await own.answer(scheduler=name, **fields) for name in ("unipc", "dpmpp_2m")]

    (refused, why), (status, _) = asyncio.run(ask())
    assert (refused, why["error"]["param"]) == (400, "scheduler")
    assert "unipc cannot step with this model's lower_order_final: False" in why["error"]["message"]
    assert status == 200
