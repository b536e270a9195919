"""Server-sent events: their bytes, pings, errors before and after the stream began, and the disconnect."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import pytest

from fakes.images import FakeImageService, fake_image
from plait_serving.diffusion.errors import NumericalError, Overloaded
from plait_serving.diffusion.values import Failed, Progress
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge import sse
from plait_serving.http.edge.feed import EventFeed
from plait_serving.images.codec import OutputFormat, encode_image
from plait_serving.images.infotext import infotext
from support.http_app import AsgiCall, make_app, make_client, pixels

URL = "/v1/images/generations"


def stream(service, **fields):
    body = {"prompt": "x", "stream": True, "seed": 3, **fields}
    return make_client(service).post(URL, json=body, headers={"x-request-id": "golden-1"})


def test_golden_bytes():
    """The stream is exactly this: comments for progress, named events, one completed event, nothing after it."""
    service = FakeImageService()
    answer = stream(service, num_inference_steps=2, partial_images=1, quality="low")
    (request,) = service.submitted
    preview = encode_image(fake_image(request, 4), OutputFormat.PNG)
    final = encode_image(fake_image(request, 3), OutputFormat.PNG, parameters=infotext(request, model="emoji", index=0))
    fields = (
        '"created_at": 1790000000, "size": "16x16", "quality": "auto", "background": "opaque", "output_format": "png"'
    )
    expected = (
        ": step 1/2\n\n"
        "event: image_generation.partial_image\n"
        'data: {"type": "image_generation.partial_image", '
        f'"b64_json": "{base64.b64encode(preview).decode()}", "partial_image_index": 0, {fields}}}\n\n'
        ": step 2/2\n\n"
        "event: image_generation.completed\n"
        'data: {"type": "image_generation.completed", '
        f'"b64_json": "{base64.b64encode(final).decode()}", "flagged": false, {fields}, '
        '"model": "emoji", "dtype": "float32", "seed": 3, "scheduler": "euler", "sigmas": null, "eta": 0.0, '
        '"num_inference_steps": 2, "guidance_scale": 7.5, "guidance_rescale": 0.0, "true_cfg_scale": 1.0, '
        '"clip_skip": 0, "max_sequence_length": null, '
        '"lora_policy": "exact", "lora_free_steps": 0, '
        '"timings": {"queue": 0.125, "lora": 0.25, "encode": 0.5, "denoise": 1.0, "decode": 0.0625, "total": 1.9375}, '
        '"ignored": ["quality"], "hints": [], "id": "golden-1"}\n\n'
    )
    assert answer.content.decode() == expected
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-request-id"] == "golden-1"


def test_a_refusal_keeps_its_status():
    """An error that is there at once is a proper answer, not a stream that began with 200."""
    answer = stream(FakeImageService(failures={"x": Overloaded("full")}))
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "overloaded"


def test_an_error_in_mid_stream_is_its_last_event():
    """The error object comes as a plain data event and nothing follows."""
    answer = stream(FakeImageService(failures={"x": NumericalError("NaN")}, fail_at_step=1))
    assert answer.status_code == 200
    last = answer.content.decode().rstrip("\n").split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "numerical_error"
    assert "completed" not in answer.text


def test_a_bug_in_mid_stream_is_told_without_its_text():
    """An unexpected error ends the stream with a general one."""
    answer = stream(FakeImageService(failures={"x": KeyError("secret")}, fail_at_step=1))
    assert '"code": "internal_error"' in answer.text
    assert "secret" not in answer.text


def test_events_never_contain_a_raw_newline():
    """A newline inside a value would end the event early."""
    raw = sse.event("e", {"text": "a\nb\r\nc\u2028"})
    assert raw.count(b"\n") == 3
    assert json.loads(raw.split(b"data: ")[1])["text"] == "a\nb\r\nc\u2028"


async def test_pings_keep_an_idle_stream_alive():
    """While a request waits in the queue, comments go out so that no proxy closes the connection."""
    settings = HttpSettings(first_event_wait_s=0.01, ping_interval_s=0.01)
    call = AsgiCall(make_app(FakeImageService(step_s=0.1), settings), b'{"prompt": "x", "stream": true}')
    await call.wait_chunk()
    assert call.chunks[0] == sse.PING
    call.disconnect()
    await call.done()


async def test_a_stream_that_was_read_to_its_end_is_not_cancelled():
    """Closing after the last event is no cancellation."""
    service = FakeImageService()
    call = AsgiCall(make_app(service), b'{"prompt": "x", "stream": true}')
    await call.done()
    assert (len(service.finished), service.cancelled) == (1, [])
    assert b"completed" in call.chunks[-1]


async def _events(*items, delay_s=0.0, log=None):
    try:
        for item in items:
            await asyncio.sleep(delay_s)
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        if log is not None:
            log.append("closed")


async def test_a_read_that_times_out_loses_nothing():
    """The event that came after the timeout is returned by the next read."""
    feed = EventFeed(_events(Progress(step=1, steps=2), delay_s=0.05))
    assert await feed.next(0.001) is None
    assert await feed.next() == Progress(step=1, steps=2)
    await feed.aclose()


async def test_closing_a_feed_in_mid_read_closes_the_generator_once():
    """The generator's clean-up has run when `aclose` returns, and a second close does nothing."""
    log = []
    feed = EventFeed(_events(Progress(step=1, steps=2), delay_s=60.0, log=log))
    assert await feed.next(0.001) is None
    await feed.aclose()
    assert log == ["closed"]
    await feed.aclose()
    assert log == ["closed"]


async def test_closing_a_feed_between_reads_closes_the_generator():
    """A generator that waits at its yield is closed too, not left to the garbage collector."""
    log = []
    feed = EventFeed(_events(Progress(step=1, steps=2), Progress(step=2, steps=2), log=log))
    await feed.next()
    await feed.aclose()
    assert log == ["closed"]


async def test_a_generator_that_raises_or_ends_reads_as_failed():
    """No reader of a feed needs to know exceptions from events."""
    raised = await EventFeed(_events(ValueError("x"))).next()
    assert isinstance(raised, Failed)
    assert isinstance(raised.error, ValueError)
    ended = await EventFeed(_events()).next()
    assert isinstance(ended, Failed)


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_partial_images_are_pictures_of_the_right_size(wanted):
    """Each partial image decodes to the output's size."""
    service = FakeImageService()
    text = stream(service, num_inference_steps=10, partial_images=wanted).text
    blocks = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    assert [block["type"] for block in blocks] == [sse.PARTIAL] * wanted + [sse.COMPLETED]
    assert all(pixels(block["b64_json"]).shape == (16, 16, 3) for block in blocks)
    assert np.array_equal(pixels(blocks[-1]["b64_json"]), fake_image(service.submitted[0], 3))
