"""Requests that can be repeated, how one may end, and what makes two answers to it equal.

An image is a function of its request, but not to the bit: rows round differently in batches of other sizes, and the
executor may take over from torch at any time. A ranking is one too, within what a batch's other rows change.

Documented are the ends that serving/docs/operations.md names ("How a request ends"): an error in the API's own form. A
stream breaks off where the ingress died with it, and nobody answers where the proxy died: such ends are the proxy's,
and only at the time of such a fault.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from plait_loadtest.mix.control_images import control_image

MAX_LEVELS = 2
"""The largest difference of a pixel, of 255: one level by another executor, one by another batch."""

MAX_SCORE = 1e-5
"""The largest difference of a score: computing the user's side once moves scores by 1e-6 (disagg/README.md)."""

DOCUMENTED = frozenset(
    {
        (422, "request_kills_replicas"),
        (429, "overloaded"),
        (503, "controlnet_unavailable"),
        (503, "engine_stopped"),
        (503, "request_lost"),
        (503, "worker_unavailable"),
        (504, "deadline_missed"),
    }
)
"""The errors with which a valid request may end while something fails, or too much is asked."""

Form: TypeAlias = Literal["image", "stream", "ranking", "v2"]
WEIGHTS: Mapping[Form, float] = {"ranking": 1.2, "v2": 2.0, "image": 0.5, "stream": 0.5}
"""How often a request is drawn: about three rankings to two images, which take far longer."""

Answer: TypeAlias = Mapping[str, np.ndarray]

_ALWAYS = frozenset({"proxy", "ingress"})
_RANKS = _ALWAYS | {"cn-picks", "hn-picks"}
_RETRIED = frozenset({429, 503})

_PROMPTS = ("penguin", "cat face", "fish", "butterfly", "frog face", "dolphin", "lion face", "octopus")
_SCHEDULERS = ("ddim", "euler", "dpmpp_2m", "unipc", "euler_a", "lcm")
_LORAS: tuple[dict[str, float], ...] = ({}, {"noto": 0.8}, {}, {"noto": 0.5, "pixel": 0.4})
_CONTROLS: tuple[tuple[str, ...], ...] = ((), ("edges",), (), ("colors",), (), ("edges", "colors"))
_IMAGES, _STREAMS, _RANKINGS = 18, 3, 12
_ITEMS, _GENRES, _CANDIDATES = 2000, 12, 100
_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request. `key` is its name; `needs`: the kinds of processes without which it has no right answer."""

    key: str
    form: Form
    path: str
    body: bytes
    needs: frozenset[str]


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


def mixed(seed: int, v2_example: Mapping[str, Any]) -> list[Ask]:
    """Return the requests of a mixed load on the starter models; the cheap ones first. `v2_example`: the ranking
    model's own example of a request."""
    rng = random.Random(seed)
    rankings = [_ranking(i, rng) for i in range(_RANKINGS)]
    v2 = Ask(
        key="v2-0", form="v2", path="/v2/models/picks/infer", body=json.dumps(v2_example).encode(), needs=_RANKS
    )  # fmt: skip
    images = [_mixed_image(i, rng, {}) for i in range(_IMAGES)]
    streams = [_mixed_image(_IMAGES + 5 * i, rng, {"stream": True, "partial_images": 1}) for i in range(_STREAMS)]
    return [*rankings, v2, *images, *streams]


def _mixed_image(i: int, rng: random.Random, more: Mapping[str, Any]) -> Ask:
    fields: dict[str, Any] = {
        "prompt": _PROMPTS[i % len(_PROMPTS)],
        "seed": rng.randrange(1 << 30),
        "size": "64x64",
        "num_inference_steps": 2 + i % 4,
        "scheduler": _SCHEDULERS[i % len(_SCHEDULERS)],
        "loras": [{"name": name, "scale": scale} for name, scale in _LORAS[i % len(_LORAS)].items()],
        "controlnets": [
            {"name": name, "image": base64.b64encode(control_image(rng.randrange(1 << 30), 64, 64)).decode()}
            for name in _CONTROLS[i % len(_CONTROLS)]
        ],
    }
    if i % 5 == 4:
        fields["deadline_ms"] = 60_000
    return image_ask(f"{'stream' if more else 'image'}-{i}", **fields, **more)


def _ranking(i: int, rng: random.Random) -> Ask:
    user = {
        "age_band": rng.randrange(7),
        "liked_genres": rng.sample(range(_GENRES), 3),
        "history": rng.sample(range(_ITEMS), 20),
        "daypart": rng.randrange(4),
    }
    body: dict[str, Any] = {"model": "picks", "user": user, "candidates": rng.sample(range(_ITEMS), _CANDIDATES)}
    if i % 6 == 5:
        body["candidates"] = "all"
    if i % 4 == 3:
        body["deadline_ms"] = 10_000
    encoded = json.dumps(body).encode()
    return Ask(key=f"ranking-{i}", form="ranking", path="/v1/recommend", body=encoded, needs=_RANKS)


# ---- answers --------------------------------------------------------------------------------------------------------


class StreamError(ValueError):
    """A stream whose last event is an error; the argument is its body."""


def answer_of(ask: Ask, body: bytes) -> Answer:
    """Parse the body of a response with status 200. Raises `StreamError`, or ValueError, KeyError or TypeError if it is
    no whole answer."""
    if ask.form == "image":
        return _images(entry["b64_json"] for entry in json.loads(body)["data"])
    if ask.form == "stream":
        return _images([_completed(body)["b64_json"]])
    if ask.form == "ranking":
        return _scores(json.loads(body)["items"])
    return {output["name"]: np.asarray(output["data"], dtype=np.float64) for output in json.loads(body)["outputs"]}


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


def _images(encoded: Iterable[str]) -> Answer:
    found = {}
    for index, text in enumerate(encoded):
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True))) as image:
            found[f"image {index}"] = np.asarray(image.convert("RGB"))
    if not found:
        raise ValueError("no image")
    return found


def _completed(body: bytes) -> Mapping[str, Any]:
    """Return the data of a stream's last event."""
    lines = [line.removeprefix("data:") for line in body.decode().split("\n") if line.startswith("data:")]
    if not lines:
        raise ValueError("no event")
    last: Mapping[str, Any] = json.loads(lines[-1])
    if "error" in last:
        raise StreamError(last["error"])
    if last.get("type") != "image_generation.completed":
        raise ValueError(f"the stream ends with {last.get('type')}")
    return last


def _scores(items: Sequence[Mapping[str, Any]]) -> Answer:
    """Return the scores by item. Raises ValueError if an item comes twice, or they are not in order."""
    scores = [float(item["score"]) for item in items]
    if scores != sorted(scores, reverse=True):
        raise ValueError("the items are not in the order of their scores")
    by_item = {int(item["id"]): score for item, score in zip(items, scores, strict=True)}
    if len(by_item) != len(scores):
        raise ValueError("an item comes twice")
    return {"items": np.array(sorted(by_item)), "scores": np.array([by_item[item] for item in sorted(by_item)])}


# ---- ends -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of a request. `status` is None if no response began; `failure`: how the connection broke.

    `is_hung`: it did not end in time; `has_left`: we closed the connection on purpose. Times are of `time.monotonic`.
    """

    began_s: float
    ended_s: float
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    failure: str | None = None
    is_hung: bool = False
    has_left: bool = False

    @property
    def taken_s(self) -> float:
        """The seconds until its end."""
        return self.ended_s - self.began_s


class End(StrEnum):
    """The end of a request."""

    RIGHT = "right"
    WRONG = "wrong"
    DOCUMENTED = "documented"
    PROXY = "proxy"
    UNDOCUMENTED = "undocumented"
    HUNG = "hung"
    DISCONNECTED = "disconnected"


class Verdict(NamedTuple):
    """An end and, for people, what exactly was seen."""

    end: End
    what: str = ""


@dataclass
class Tally:
    """Ends, counted. `seen`: what was seen of all ends but the right ones."""

    ends: Counter[End] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> Verdict:
        """Count a verdict, and return it."""
        self.ends[verdict.end] += 1
        if verdict.what:
            self.seen[f"{verdict.end}: {verdict.what}"] += 1
        return verdict

    @property
    def total(self) -> int:
        """The number of requests."""
        return self.ends.total()

    @property
    def failures(self) -> list[str]:
        """What was seen of the ends that no request may have."""
        bad = (End.WRONG, End.UNDOCUMENTED, End.HUNG)
        return [f"{what} ({count}x)" for what, count in self.seen.items() if what.startswith(bad)]


def verdict_of(ask: Ask, reply: Reply, expected: Answer | None, *, in_our_stead: bool = False) -> Verdict:
    """Return the end of a request. `expected` None: any whole answer is right. `in_our_stead`: whether Serve's proxy
    failed while it was in flight, so that nobody had to answer."""
    if reply.is_hung:
        return Verdict(End.HUNG, f"no end after {reply.taken_s:.0f} s (status {reply.status})")
    if reply.has_left:
        return Verdict(End.DISCONNECTED)
    theirs = End.PROXY if in_our_stead else End.UNDOCUMENTED
    if reply.failure is not None:
        began = "no response" if reply.status is None else f"a response with status {reply.status} that broke off"
        return Verdict(theirs, f"{began}: {reply.failure.partition(':')[0]}")
    if reply.status != 200:
        return _refused(ask, reply.status or 0, reply.headers, reply.body)
    try:
        got = answer_of(ask, reply.body)
    except StreamError as error:
        return _coded(200, error.args[0], has_retry=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        if ask.form == "stream" and in_our_stead:
            return Verdict(theirs, "a stream that was cut")
        return Verdict(End.WRONG, f"{ask.key}: {error!r}"[:_SHOWN_CHARS])
    why = None if expected is None else difference(ask, expected, got)
    return Verdict(End.RIGHT) if why is None else Verdict(End.WRONG, f"{ask.key}: {why}")


def _refused(ask: Ask, status: int, headers: Mapping[str, str], body: bytes) -> Verdict:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        kind = headers.get("content-type", "no content type")
        return Verdict(End.UNDOCUMENTED, f"{status} {kind}: {body.decode(errors='replace')[:_SHOWN_CHARS]}")
    has_retry = status not in _RETRIED or headers.get("retry-after", "").isdigit()
    if ask.form == "v2":  # its errors have a message and no code
        is_known = isinstance(error, str) and status in {known for known, _ in DOCUMENTED} and has_retry
        return Verdict(End.DOCUMENTED if is_known else End.UNDOCUMENTED, f"{status} (v2)")
    return _coded(status, error, has_retry=has_retry)


def _coded(status: int, error: Any, *, has_retry: bool) -> Verdict:
    """Judge an error in OpenAI's form; one that ends a stream has no status of its own."""
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return Verdict(End.UNDOCUMENTED, f"{status} in no known form: {error}"[:_SHOWN_CHARS])
    what = f"{status} {error['code']}"
    if not has_retry:
        return Verdict(End.UNDOCUMENTED, f"{what} without retry-after")
    is_known = any(error["code"] == code and status in (200, known) for known, code in DOCUMENTED)
    return Verdict(End.DOCUMENTED if is_known else End.UNDOCUMENTED, what)
