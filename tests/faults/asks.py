"""Requests that can be repeated, and what makes two answers to one of them equal.

An image is a function of its request, but not to the bit: rows round differently in batches of other sizes, and the
executor may take over from torch at any time. A ranking is one too, within what a batch's other rows change.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from PIL import Image

__all__ = ["MAX_LEVELS", "MAX_SCORE", "Answer", "Ask", "StreamError", "answer_of", "difference", "image_ask", "mixed"]

MAX_LEVELS = 2
"""The largest difference of a pixel, of 255: one level by another executor, one by another batch."""

MAX_SCORE = 1e-5
"""The largest difference of a score: computing the user's side once moves scores by 1e-6 (disagg/README.md)."""

Form: TypeAlias = Literal["image", "stream", "ranking", "v2"]
Answer: TypeAlias = Mapping[str, np.ndarray]

_ALWAYS = frozenset({"proxy", "ingress"})
_PROMPTS = ("penguin", "cat face", "fish", "butterfly", "frog face", "dolphin", "lion face", "octopus")
_SCHEDULERS = ("ddim", "euler", "dpmpp_2m", "unipc", "euler_a", "lcm")
_LORAS: tuple[list[dict[str, Any]], ...] = (
    [],
    [{"name": "noto", "scale": 0.8}],
    [],
    [{"name": "noto", "scale": 0.5}, {"name": "pixel", "scale": 0.4}],
)
_CONTROLS: tuple[tuple[str, ...], ...] = ((), ("edges",), (), ("colors",), (), ("edges", "colors"))
_IMAGES, _STREAMS, _RANKINGS = 18, 3, 12
_ITEMS, _GENRES, _CANDIDATES = 2000, 12, 100


class StreamError(ValueError):
    """A stream whose last event is an error; `error` is its body."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request. `key` is its name; `needs`: the kinds of processes without which it has no right answer."""

    key: str
    form: Form
    path: str
    body: bytes
    needs: frozenset[str]


def mixed(seed: int, v2_example: Mapping[str, Any], *, model: str = "picks") -> list[Ask]:
    """Return the requests of a mixed load on the starter models; the cheap ones first. `v2_example`: the model's own
    example of a request."""
    rng = random.Random(seed)
    rankings = [_ranking(i, rng, model) for i in range(_RANKINGS)]
    v2 = Ask(
        key="v2-0",
        form="v2",
        path=f"/v2/models/{model}/infer",
        body=json.dumps(v2_example).encode(),
        needs=_ranks(model),
    )
    images = [_mixed_image(i, rng, is_stream=False) for i in range(_IMAGES)]
    streams = [_mixed_image(_IMAGES + 5 * i, rng, is_stream=True) for i in range(_STREAMS)]
    return [*rankings, v2, *images, *streams]


def image_ask(key: str, **fields: Any) -> Ask:
    """Return the request for an image."""
    controls = [control["name"] for control in fields.get("controlnets", ())]
    return Ask(
        key=key,
        form="stream" if fields.get("stream") else "image",
        path="/v1/images/generations",
        body=json.dumps(fields).encode(),
        needs=_ALWAYS | {"engine", *(f"controlnet-{name}" for name in controls)},
    )


def _mixed_image(i: int, rng: random.Random, *, is_stream: bool) -> Ask:
    fields: dict[str, Any] = {
        "prompt": _PROMPTS[i % len(_PROMPTS)],
        "seed": rng.randrange(1 << 30),
        "size": "64x64",
        "num_inference_steps": 2 + i % 4,
        "scheduler": _SCHEDULERS[i % len(_SCHEDULERS)],
        "loras": _LORAS[i % len(_LORAS)],
        "controlnets": [{"name": name, "image": _control_map(rng)} for name in _CONTROLS[i % len(_CONTROLS)]],
    }
    if i % 5 == 4:
        fields["deadline_ms"] = 60_000
    if is_stream:
        fields |= {"stream": True, "partial_images": 1}
    return image_ask(f"{'stream' if is_stream else 'image'}-{i}", **fields)


def _ranking(i: int, rng: random.Random, model: str) -> Ask:
    user = {
        "age_band": rng.randrange(7),
        "liked_genres": rng.sample(range(_GENRES), 3),
        "history": rng.sample(range(_ITEMS), 20),
        "daypart": rng.randrange(4),
    }
    body: dict[str, Any] = {"model": model, "user": user, "candidates": rng.sample(range(_ITEMS), _CANDIDATES)}
    if i % 6 == 5:
        body["candidates"] = "all"
    if i % 4 == 3:
        body["deadline_ms"] = 10_000
    encoded = json.dumps(body).encode()
    return Ask(key=f"ranking-{i}", form="ranking", path="/v1/recommend", body=encoded, needs=_ranks(model))


def _ranks(model: str) -> frozenset[str]:
    return _ALWAYS | {f"cn-{model}", f"hn-{model}"}


def _control_map(rng: random.Random) -> str:
    """Return a map with structure, as base64: blocks of 8 pixels, black or white."""
    blocks = np.array([[rng.randrange(2) * 255 for _ in range(8)] for _ in range(8)], dtype=np.uint8)
    image = Image.fromarray(np.kron(blocks, np.ones((8, 8), dtype=np.uint8))).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def answer_of(ask: Ask, body: bytes) -> Answer:
    """Parse the body of a response with status 200. Raises `StreamError`, or ValueError, KeyError or TypeError if it is
    no whole answer."""
    if ask.form == "image":
        return _images(entry["b64_json"] for entry in json.loads(body)["data"])
    if ask.form == "stream":
        return _images([_completed(body)["b64_json"]])
    if ask.form == "ranking":
        return _scores(json.loads(body)["items"])
    outputs = json.loads(body)["outputs"]
    return {output["name"]: np.asarray(output["data"], dtype=np.float64) for output in outputs}


def difference(ask: Ask, expected: Answer, got: Answer) -> str | None:
    """Return how an answer differs from the expected one by more than rounding may; None if it does not."""
    if expected.keys() != got.keys():
        return f"{sorted(got)[:5]} where {sorted(expected)[:5]} were expected"
    limit = MAX_LEVELS if ask.form in ("image", "stream") else MAX_SCORE
    for name, wanted in expected.items():
        there = got[name]
        if there.shape != wanted.shape:
            return f"{name} has the shape {there.shape}, not {wanted.shape}"
        found = float(np.abs(there.astype(np.float64) - wanted.astype(np.float64)).max(initial=0.0))
        if not found <= limit:  # NaN is no number within the limit
            return f"{name} differs by {found:g}, more than {limit:g}"
    return None


def _images(encoded: Any) -> Answer:
    found = {}
    for index, text in enumerate(encoded):
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True))) as image:
            found[f"image {index}"] = np.asarray(image.convert("RGB"))
    if not found:
        raise ValueError("no image")
    return found


def _completed(body: bytes) -> Mapping[str, Any]:
    """Return the data of a stream's last event."""
    events = [event for event in _events(body) if event]
    if not events:
        raise ValueError("no event")
    last: Mapping[str, Any] = events[-1]
    if "error" in last:
        raise StreamError(last)
    if last.get("type") != "image_generation.completed":
        raise ValueError(f"the stream ends with {last.get('type')}")
    return last


def _events(body: bytes) -> Sequence[Mapping[str, Any]]:
    lines = body.decode().split("\n")
    return [json.loads(line.removeprefix("data:")) for line in lines if line.startswith("data:")]


def _scores(items: Sequence[Mapping[str, Any]]) -> Answer:
    """Return the scores by item. Raises ValueError if an item comes twice, or they are not in order."""
    scores = [float(item["score"]) for item in items]
    if scores != sorted(scores, reverse=True):
        raise ValueError("the items are not in the order of their scores")
    by_item = {int(item["id"]): score for item, score in zip(items, scores, strict=True)}
    if len(by_item) != len(scores):
        raise ValueError("an item comes twice")
    return {"items": np.array(sorted(by_item)), "scores": np.array([by_item[item] for item in sorted(by_item)])}
