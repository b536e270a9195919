"""Requests for images: the OpenAI Images API with plait's extensions (`loras`, `controlnets`, ...)."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait_loadtest.distributions import Floats, WeightedChoice, cumulative, pick_distinct, pick_texts, zipf_weights
from plait_loadtest.errors import ScenarioError
from plait_loadtest.mix.control_images import control_image, mask_image
from plait_loadtest.scenario import ControlNets, Edits, ImageClass, LoadTarget, Loras
from plait_loadtest.seeds import Chunks, Numbered
from plait_loadtest.values import PreparedRequest

DEFAULT_PATH = "/v1/images/generations"
MAX_CONTROLNETS = 3
OWN_FIELDS = frozenset(
    {"prompt", "model", "n", "size", "num_inference_steps", "seed", "guidance_scale", "scheduler", "loras"}
    | {"controlnets", "deadline_ms", "stream", "image", "mask", "strength"}
)
"""The fields that the generator sets itself; `extra` may add others, including `partial_images`."""

_SEEDS = 1 << 31  # what every image server takes as a seed
_DRAWN_EDGE_PX = 64  # of drawn control images where the request names no size; servers stretch them


@dataclass(frozen=True, slots=True)
class ImageDraw:
    """The values drawn for one request."""

    prompt: str
    size: str | None
    steps: int
    images: int
    seed: int
    loras: tuple[str, ...]
    controlnets: tuple[str, ...]
    model: str | None
    masked: bool | None  # None: not an edit


class ImageRequests:
    """Builds the requests of one class. Reads prompts and control images once; raises `ScenarioError` if it cannot."""

    def __init__(self, spec: ImageClass, target: LoadTarget, numbered: Numbered) -> None:
        self._spec = spec
        self._path = target.path or DEFAULT_PATH
        own = {"content-type": "application/json", **{name.lower(): value for name, value in spec.headers.items()}}
        self._headers = tuple(own.items())
        if spec.stream:
            self._headers += (("accept", "text/event-stream"),)
        self._fixed = _fixed_fields(spec, target)
        self._prompts = _prompts(spec)
        sizes: Mapping[Any, float] = spec.size or {None: 1.0}
        models: Mapping[Any, float] = spec.models or {None: 1.0}
        self._size, self._model = WeightedChoice[str | None](sizes), WeightedChoice[str | None](models)
        self._steps, self._images = WeightedChoice(spec.steps), WeightedChoice(spec.images)
        self._loras, self._controlnets = _AddOns(spec.loras), _AddOns(spec.controlnets)
        self._control_images = read_images("controlnets.images", spec.controlnets.images)
        self._edits = EditFields(spec.edits)
        # What a scenario does not use takes no column, so that its requests stay those of its seed.
        columns = 5 + self._loras.columns + self._controlnets.columns + self._edits.columns
        columns += len(spec.models or ()) > 1
        self._chunks = Chunks(numbered, columns, self._draw_chunk)

    def draw(self, index: int) -> ImageDraw:
        """Return what request `index` asks for."""
        return self._chunks[index]

    def _draw_chunk(self, uniforms: Floats) -> list[ImageDraw]:
        prompts, sizes = pick_texts(self._prompts, uniforms[:, 0]), self._size.pick(uniforms[:, 1])
        steps, images = self._steps.pick(uniforms[:, 2]), self._images.pick(uniforms[:, 3])
        seeds = (uniforms[:, 4] * _SEEDS).astype(np.int64).tolist()
        first = 5 + self._loras.columns
        second = first + self._controlnets.columns
        loras, controlnets = self._loras.pick(uniforms[:, 5:first]), self._controlnets.pick(uniforms[:, first:second])
        models = self._model.pick(uniforms[:, -1])
        edits = self._edits.pick(uniforms[:, second : second + self._edits.columns])
        drawn = zip(prompts, sizes, steps, images, seeds, loras, controlnets, models, edits, strict=True)
        return [ImageDraw(*row) for row in drawn]

    def build(self, index: int) -> PreparedRequest:
        """Return the request with what was drawn for it as a JSON body."""
        draw, spec = self.draw(index), self._spec
        body: dict[str, object] = {"prompt": draw.prompt, "n": draw.images, "num_inference_steps": draw.steps}
        body["seed"] = draw.seed
        if draw.size is not None:
            body["size"] = draw.size
        if draw.loras:
            body["loras"] = [{"name": name, "scale": spec.loras.scale} for name in draw.loras]
        if draw.controlnets:
            body["controlnets"] = [
                {"name": name, "image": self._control_image(index, slot, draw.size), "scale": spec.controlnets.scale}
                for slot, name in enumerate(draw.controlnets)
            ]
        if draw.masked is not None:
            body |= self._edits.fields(index, pixels(draw.size), masked=draw.masked)
        body |= self._fixed
        if draw.model is not None:
            body["model"] = draw.model
        text = json.dumps(body, separators=(",", ":"))
        path = self._path if draw.masked is None else spec.edits.path
        return PreparedRequest(method="POST", path=path, headers=self._headers, body=text.encode())

    def _control_image(self, index: int, slot: int, size: str | None) -> str:
        if self._control_images:
            return self._control_images[(index + slot) % len(self._control_images)]
        return _text(control_image(index * MAX_CONTROLNETS + slot, *pixels(size)))

    def asked(self, index: int) -> int:
        """Return how many images request `index` asks for."""
        return self.draw(index).images


class _AddOns:
    """How many LoRAs or ControlNets a request carries, and which: all different, in the order they were drawn.

    Each is drawn by popularity from those that the request does not have yet.
    """

    def __init__(self, spec: Loras | ControlNets) -> None:
        self._names, weights = popularity(spec)
        self._sums: list[float] = cumulative(weights).tolist() if self._names else []
        self._count = WeightedChoice(spec.count)
        self.columns = 1 + max_drawn(spec.count)

    def pick(self, uniforms: Floats) -> list[tuple[str, ...]]:
        """Return names for each row of `uniforms` (rows, columns)."""
        if self.columns == 1:
            return [()] * len(uniforms)
        counts, rows = self._count.pick(uniforms[:, 0]), uniforms[:, 1:].tolist()
        return [
            tuple(self._names[i] for i in pick_distinct(self._sums, row[:count])) if count else ()
            for count, row in zip(counts, rows, strict=True)
        ]


def max_drawn(count: Mapping[int, float]) -> int:
    """Return the largest number that may be drawn."""
    return max((number for number, weight in count.items() if weight > 0), default=0)


def popularity(spec: Loras | ControlNets) -> tuple[list[str], list[float]]:
    """Return the names and their weights: the empirical list, or Zipf's law over the order of names."""
    if spec.popularity is not None:
        return list(spec.popularity), list(spec.popularity.values())
    return list(spec.names), zipf_weights(len(spec.names), spec.zipf).tolist()


def pixels(size: str | None) -> tuple[int, int]:
    """Return width and height of `"64x32"`; those of drawn images where the model's own size is requested."""
    width, cross, height = (size or "auto").partition("x")
    is_size = cross and width.isdecimal() and height.isdecimal()
    return (int(width), int(height)) if is_size else (_DRAWN_EDGE_PX, _DRAWN_EDGE_PX)


def _fixed_fields(spec: ImageClass, target: LoadTarget) -> dict[str, object]:
    """Return the fields of the body that are the same in all requests of the class; unset ones are absent."""
    deadline = spec.deadline_ms
    given: dict[str, object] = {
        "model": target.model,
        "guidance_scale": spec.guidance_scale,
        "scheduler": spec.scheduler,
        "deadline_ms": int(deadline) if deadline is not None and deadline.is_integer() else deadline,
        "stream": True if spec.stream else None,
        "partial_images": 1 if spec.stream else None,  # one preview, so that a first part can be timed
    }
    return {name: value for name, value in given.items() if value is not None} | dict(spec.extra)


def _prompts(spec: ImageClass) -> tuple[str, ...]:
    if spec.prompts_file is None:
        return spec.prompts
    try:
        lines = spec.prompts_file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"prompts_file: {spec.prompts_file} cannot be read as text: {error}") from error
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        raise ScenarioError(f"prompts_file: {spec.prompts_file} has no prompt")
    return prompts


_FIRST = 1 << 40
"""Added to a request's number, so that it does not start from the image of a ControlNet."""


class EditFields:
    """Draws which requests of a class are edits and builds what these carry. Reads files once; raises
    `ScenarioError`."""

    def __init__(self, spec: Edits) -> None:
        self._spec = spec
        self._images = read_images("edits.images", spec.images)
        self._masks = read_images("edits.masks", spec.masks)
        self.columns = 2 if spec.share > 0 else 0

    def pick(self, uniforms: Floats) -> list[bool | None]:
        """Return for each row of `uniforms` (rows, columns) whether it has a mask; None for one that is no edit."""
        if not self.columns:
            return [None] * len(uniforms)
        return [
            masked < self._spec.masked if chosen < self._spec.share else None for chosen, masked in uniforms.tolist()
        ]

    def fields(self, index: int, edge: tuple[int, int], *, masked: bool) -> dict[str, object]:
        """Return the fields of request `index`; `edge`: width and height of what is drawn."""
        place = index % max(len(self._images), 1)
        image = self._images[place] if self._images else _text(control_image(_FIRST + index, *edge))
        found: dict[str, object] = {"image": image}
        if masked:
            found["mask"] = self._masks[place] if self._masks else _text(mask_image(index, *edge))
        if self._spec.strength is not None:
            found["strength"] = self._spec.strength
        return found


def read_images(field: str, paths: Sequence[Path]) -> list[str]:
    """Return files as base64. Raises `ScenarioError` that names the field."""
    return [_text(read_file(field, path)) for path in paths]


def read_file(field: str, path: Path) -> bytes:
    """Return what a file holds. Raises `ScenarioError` that names the field."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ScenarioError(f"{field}: {path} cannot be read: {error.strerror}") from error


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
