"""Whether an answer with a good status is a success, by the scenario's own check or by the rules of its API (OpenAI
Images, its event streams, the Open Inference Protocol v2), and the server's own timing.

Evaluated only where a scenario needs it, after the last byte was stamped, on the loop: 2 MB of base64 cost 0.3 ms,
700 scores as JSON 0.03 ms. A JSON path of a large body costs milliseconds that appear as send lag of other requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic_core import from_json

from plait_loadtest.scenario import ResponseCheck, Scenario
from plait_loadtest.wire.framing import Head

COMPLETED = ("image_generation.completed", "image_edit.completed")
"""The last event of an OpenAI image stream; `[DONE]` may follow."""

_DONE = b"[DONE]"
_END_WITH_DONE = ("chat.completion.chunk", "text_completion")  # OpenAI's text streams, by `object` of their events


class AnswerFacts(NamedTuple):
    """What an answer with a good status holds. `why`: why it is no success, empty if it is; `said`: what it said
    instead. `server_ms`: the server's own time, nan without one."""

    why: str = ""
    said: bytes = b""
    images: int = 0
    server_ms: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judges responses. `keeps_body`: all bodies are needed; without it those of event streams are. `check`: the
    scenario's own, in place of what its API promises; None: it has none."""

    api: str
    check: ResponseCheck | None
    keeps_body: bool

    def look(self, head: Head, body: bytes, asked: int) -> AnswerFacts:
        """Return what a response with a good status holds, of `asked` images or outputs. Errors in an event stream are
        failures whatever the scenario's own check says."""
        is_images, check = self.api == "images", self.check
        promised = 0 if check is not None else asked
        if promised and not is_images:
            facts = look_at_outputs(body, promised)
        elif head.is_event_stream:
            facts = look_at_stream(body, promised, is_images=is_images and check is None)
        else:
            facts = look_at_images(body, promised) if is_images else AnswerFacts()
        if check is not None and not facts.why and (missed := missed_by(check, body)):
            facts = facts._replace(why=missed, said=body)
        return facts._replace(server_ms=head.server_ms) if math.isnan(facts.server_ms) else facts


def judge_of(scenario: Scenario) -> Judge:
    """Return the judge by the scenario's check, by default by the usual response of its API; `raw` has none."""
    check, api = scenario.target.check, scenario.target.api
    own = None if check == ResponseCheck() else check
    return Judge(api=api, check=own, keeps_body=own is not None or api != "raw")


def missed_by(check: ResponseCheck, body: bytes) -> str:
    """Return what a body lacks of what it should have; empty: nothing."""
    if len(body) < check.least_bytes:
        return f"fewer bytes than target.check.least_bytes ({check.least_bytes})"
    if check.contains is not None and check.contains.encode() not in body:
        return f"no {check.contains!r} in the body"
    return "" if check.json_path is None or has_path(body, check.json_path) else f"no {check.json_path} in the body"


def has_path(body: bytes, path: str) -> bool:
    """Return whether the JSON `body` has something at a dotted path (numbers index lists); False if it is not JSON."""
    try:
        value: Any = from_json(body)
    except ValueError:
        return False
    for step in path.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return False
    return True


def look_at_images(body: bytes, asked: int) -> AnswerFacts:
    """Count the images of an answer to a request for `asked`."""
    value = _object(body)
    data = value.get("data")
    images = sum(map(_is_image, data)) if isinstance(data, list) else 0
    why = f"{images} of {asked} images came" if images < asked else ""
    return AnswerFacts(why, b"" if images else body, images, _timings_ms(value))


def look_at_outputs(body: bytes, asked: int) -> AnswerFacts:
    """Count the outputs of an inference that hold something; binary ones follow the JSON document."""
    value, binary_bytes = _object(body), 0
    if not value:
        try:
            value, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
            binary_bytes = len(body) - end
        except (ValueError, RecursionError):
            pass
    outputs = value.get("outputs") if isinstance(value, dict) else None
    came = 0
    for output in outputs if isinstance(outputs, list) else ():
        parameters = output.get("parameters") if isinstance(output, dict) else None
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if isinstance(size, int) and 0 < size <= binary_bytes:
            came, binary_bytes = came + 1, binary_bytes - size
        elif isinstance(output, dict) and output.get("data"):
            came += 1
    return AnswerFacts(f"{came} of {asked} outputs came", b"" if came else body) if came < asked else AnswerFacts()


def look_at_stream(body: bytes, asked: int, *, is_images: bool) -> AnswerFacts:
    """Return what a stream holds; an event that reports an error, or an end that its API does not have, is a failure.

    `is_images`: it should end as OpenAI's image streams do, with `asked` images.
    """
    images, is_completed, wants_done, last, server_ms = 0, False, False, b"", math.nan
    for name, data in events(body):
        value, last = _object(data), name.encode() or data
        kinds = (name, value.get("type"))
        if "error" in kinds or value.get("error"):
            return AnswerFacts("an error in the stream", data, images)
        if any(kind in COMPLETED for kind in kinds):
            is_completed, server_ms = True, _timings_ms(value)
            images += _is_image(value)
        wants_done = data != _DONE and (wants_done or value.get("object") in _END_WITH_DONE)
    if is_images and not is_completed:
        return AnswerFacts(f"the stream ended without {COMPLETED[0]}", last, images)
    if wants_done:
        return AnswerFacts("the stream ended without [DONE]", last, images)
    return AnswerFacts(f"{images} of {asked} images came" if images < asked else "", b"", images, server_ms)


def events(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and data of each event of a whole stream (WHATWG HTML, 9.2.6); what no blank line ends is none."""
    name, data = b"", list[bytes]()
    for line in body.removeprefix(b"\xef\xbb\xbf").splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
        elif not line:
            if data:
                yield name.decode(errors="replace"), b"\n".join(data)
            name, data = b"", []


def _object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    try:
        value = from_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_image(entry: object) -> bool:
    """Return whether an entry of `data`, or an event, has an image or the address of one."""
    return isinstance(entry, dict) and any(
        isinstance(entry.get(key), str) and entry[key].strip() for key in ("b64_json", "url")
    )


def _timings_ms(value: dict[str, Any]) -> float:
    """Return the milliseconds of `"timings": {stage: seconds}`: its `total`, or the sum; nan without one."""
    try:
        stages = value["timings"]
        return float(stages["total"] if "total" in stages else sum(stages.values())) * 1000.0
    except (KeyError, ValueError, TypeError, AttributeError):
        return math.nan
