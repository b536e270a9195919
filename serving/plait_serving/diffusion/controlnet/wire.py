"""The messages between base replicas and a ControlNet service over the fabric, validated field by field.

::

    client -> service   open {session, request, width, height, n, cfg} + image, text, added.*     no answer
                        step {seq, calls: [[session, timestep, scale, exact], ...]} + sample.0, sample.1, ...
                        close {session}                                                           no answer
    service -> client   welcome {controlnet}, after the client's hello
                        residuals {seq, errors: [null | [code, message], ...]} + i.0, i.1, ..., i.mid for each call i

An open that fails is remembered; the first step that names the session gets the error. A reply carries the tensors
of the calls that succeeded. Messages are JSON and raw tensors: nothing is unpickled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from plait_fabric.rpc import fields
from plait_fabric.rpc.fields import Header, WireError
from plait_serving.diffusion.errors import (
    ControlNetUnavailable,
    EngineError,
    ModelError,
    NotFound,
    OutOfMemory,
    RequestError,
)
from plait_serving.diffusion.protocols import Conditioning, ControlCall, Residuals
from plait_serving.diffusion.values import RgbImage

VERSION = 2
"""The version of everything defined here; both sides of a channel must have the same."""

Tensors: TypeAlias = Mapping[str, torch.Tensor]

_MAX_SIDE = 16_384  # pixels; far above any model's native size, far below what exhausts a process
_MAX_IMAGES = 1_024  # per request
MAX_CALLS = 32
"""The max calls in one step message: 32 x 13 residual tensors stay far below the fabric's 1,024 buffers and 64 KiB
header."""
_MAX_MESSAGE_CHARS = 2_000
_MAX_ID_CHARS = 200
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class UnknownSession(ControlNetUnavailable):
    """The client is to open the session again: it was never seen, or was evicted."""

    code = "unknown_session"


_KINDS: dict[str, type[EngineError]] = {
    kind.code: kind for kind in (ModelError, NotFound, OutOfMemory, RequestError, UnknownSession)
}
"""What an error is by its code; any other is a plain `EngineError`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Open:
    """A request's constants; `session` is the client's number for them, unique on its channel, `request` the id for
    the log."""

    session: int
    request: str = ""
    image: RgbImage
    conditioning: Conditioning
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """Calls, in sessions by number, that agree in the shape of a row; `seq` identifies the answer."""

    seq: int
    calls: tuple[ControlCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The session is no longer needed."""

    session: int


Request: TypeAlias = Open | Step | Close

Answer: TypeAlias = Residuals | EngineError
"""The answer to one call."""


def open_message(request: Open) -> tuple[Header, Tensors]:
    """Return a request's constants, as header and tensors."""
    conditioning = request.conditioning
    header = {
        "op": "open",
        "session": request.session,
        "request": request.request[:_MAX_ID_CHARS],
        "width": request.width,
        "height": request.height,
        "n": conditioning.n,
        "cfg": conditioning.branches == 2,
    }
    tensors = {"image": torch.from_numpy(np.array(request.image, order="C")), "text": conditioning.text}
    return header, tensors | {f"added.{name}": value for name, value in conditioning.added.items()}


def step_message(seq: int, calls: Sequence[ControlCall]) -> tuple[Header, Tensors]:
    """Return the calls of a step, in sessions by number, as header and tensors."""
    listed = [[call.session, float(call.timestep), float(call.scale), call.exact] for call in calls]
    return {"op": "step", "seq": seq, "calls": listed}, {f"sample.{i}": call.sample for i, call in enumerate(calls)}


def reply_message(seq: int, answers: Sequence[Answer]) -> tuple[Header, Tensors]:
    """Return the answers to a step's calls, in their order, as header and tensors."""
    listed: list[list[str] | None] = []
    tensors: dict[str, torch.Tensor] = {}
    for i, answer in enumerate(answers):
        if isinstance(answer, Residuals):
            listed.append(None)
            tensors.update({f"{i}.{j}": tensor for j, tensor in enumerate(answer.down)})
            tensors[f"{i}.mid"] = answer.mid
        else:
            listed.append([answer.code, answer.message[:_MAX_MESSAGE_CHARS]])
    return {"op": "residuals", "seq": seq, "errors": listed}, tensors


def parse_request(header: Header, tensors: Tensors) -> Request:
    """Parse a client's message. Its tensors are not copied: clone what must outlive them. Raises `WireError`."""
    match header.get("op"):
        case "open":
            return _parse_open(header, tensors)
        case "step":
            return _parse_step(header, tensors)
        case "close":
            _expect(header, {"op", "session"}, tensors, set())
            return Close(session=fields.integer(header, "session"))
        case other:
            raise WireError(f"unknown operation {str(other)[:40]!r}")


def parse_welcome(payload: Header) -> str:
    """Return the name of the ControlNet that answered. Raises `WireError`."""
    fields.only(payload, {"controlnet"})
    return fields.text(payload, "controlnet")


def parse_reply(header: Header, tensors: Tensors) -> tuple[int, tuple[Answer, ...]]:
    """Return the number of a step and the answers to its calls. Raises `WireError`."""
    fields.only(header, {"op", "seq", "errors"})
    if header["op"] != "residuals":
        raise WireError("the service sent something that is not an answer")
    listed = fields.entries(header, "errors", MAX_CALLS)
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if tensor.dim() != 4 or tensor.dtype not in _FLOATS:
            raise WireError("residuals must be four-dimensional floats")
        call, _, part = name.partition(".")
        parts[call][part] = tensor
    if not listed or set(parts) != {str(i) for i, entry in enumerate(listed) if entry is None}:
        raise WireError("the answer's tensors are not those of the calls that worked")
    answers = tuple(_residuals(parts[str(i)]) if entry is None else _error(entry) for i, entry in enumerate(listed))
    return fields.integer(header, "seq"), answers


def _parse_open(header: Header, tensors: Tensors) -> Open:
    added = {name.removeprefix("added."): value for name, value in tensors.items() if name.startswith("added.")}
    expected = {"image", "text"} | {f"added.{name}" for name in added}
    _expect(header, {"op", "session", "request", "width", "height", "n", "cfg"}, tensors, expected)
    branches = 2 if fields.boolean(header, "cfg") else 1
    image, encoded = tensors["image"], tensors["text"]
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3 or max(image.shape) > _MAX_SIDE:
        raise WireError(f"image must be uint8 (H, W, 3), not {image.dtype} {tuple(image.shape)}")
    if encoded.dtype not in _FLOATS or encoded.dim() != 3 or encoded.shape[0] != branches:
        raise WireError(f"text must be float ({branches}, L, C), not {encoded.dtype} {tuple(encoded.shape)}")
    for name, value in added.items():
        if name not in ("text_embeds", "time_ids") or value.dim() != 2 or value.shape[0] != branches:
            raise WireError(f"added.{name[:40]} must be text_embeds or time_ids of {branches} rows")
    return Open(
        session=fields.integer(header, "session"),
        request=fields.text(header, "request", _MAX_ID_CHARS),
        image=image.numpy(),
        conditioning=Conditioning(text=encoded, added=added, n=fields.integer(header, "n", 1, _MAX_IMAGES)),
        width=fields.integer(header, "width", 8, _MAX_SIDE),
        height=fields.integer(header, "height", 8, _MAX_SIDE),
    )


def _parse_step(header: Header, tensors: Tensors) -> Step:
    listed = fields.entries(header, "calls", MAX_CALLS)
    if not listed:
        raise WireError("calls must not be empty")
    _expect(header, {"op", "seq", "calls"}, tensors, {f"sample.{i}" for i in range(len(listed))})
    calls = tuple(_parse_call(entry, tensors[f"sample.{i}"]) for i, entry in enumerate(listed))
    first = calls[0].sample
    if any(call.sample.shape[1:] != first.shape[1:] or call.sample.dtype != first.dtype for call in calls):
        raise WireError("the samples of a step must agree in shape and dtype")
    return Step(seq=fields.integer(header, "seq"), calls=calls)


def _parse_call(entry: object, sample: torch.Tensor) -> ControlCall:
    if not isinstance(entry, list) or len(entry) != 4:
        raise WireError("a call is [session, timestep, scale, exact]")
    if sample.dtype not in _FLOATS or sample.dim() != 4 or 0 in sample.shape:
        raise WireError(f"a sample must be float (R, c, h, w), not {sample.dtype} {tuple(sample.shape)}")
    named = dict(zip(("session", "timestep", "scale", "exact"), entry, strict=True))
    return ControlCall(
        session=fields.integer(named, "session"),
        sample=sample,
        timestep=torch.tensor(fields.number(named, "timestep"), dtype=torch.float32),
        scale=fields.number(named, "scale"),
        exact=fields.boolean(named, "exact"),
    )


def _residuals(parts: Mapping[str, torch.Tensor]) -> Residuals:
    names = [str(i) for i in range(len(parts) - 1)]
    if set(parts) != {*names, "mid"}:
        raise WireError("a call's tensors are 0, 1, ..., mid")
    return Residuals(down=tuple(parts[name] for name in names), mid=parts["mid"])


def _error(entry: object) -> EngineError:
    match entry:
        case [str(code), str(message)]:
            return _KINDS.get(code, EngineError)(message)
        case _:
            raise WireError("an error is [code, message]")


def _expect(header: Header, keys: set[str], tensors: Tensors, names: set[str]) -> None:
    fields.only(header, keys)
    if set(tensors) != names:
        raise WireError(f"{header['op']} carries the tensors {sorted(names)}")
