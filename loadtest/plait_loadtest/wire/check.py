"""What a response must contain, and the server's own timing. Evaluated only where the scenario needs it.

Checks run after the last byte was stamped, on the loop: a JSON path of a large body costs milliseconds that appear
as send lag of other requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait_loadtest.scenario import ResponseCheck, Scenario
from plait_loadtest.values import RequestOutcome
from plait_loadtest.wire.framing import Head

# What every answer of these APIs has: OpenAI Images, Open Inference Protocol v2 (also with binary tensors).
_MARKS: dict[str, tuple[bytes, ...]] = {"images": (b'"b64_json"', b'"url"'), "infer": (b'"outputs"',)}
_ERROR_EVENT = b'\ndata: {"error"'  # the status line was gone when it happened
_TIMINGS = b'"timings"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judges responses. `keeps_body`: bodies are needed. Without it `outcome` and `server_ms` see empty ones."""

    keeps_body: bool
    accepts: Callable[[bytes], bool]
    is_images: bool

    def outcome(self, body: bytes) -> RequestOutcome:
        """Return OK or CHECK for a response with a good status. An image stream that ends in an error event failed."""
        if self.is_images and (_ERROR_EVENT in body or body.startswith(_ERROR_EVENT[1:])):
            return RequestOutcome.CHECK
        return RequestOutcome.OK if not self.keeps_body or self.accepts(body) else RequestOutcome.CHECK

    def server_ms(self, head: Head, body: bytes) -> float:
        """Return the milliseconds that the server reports, or nan; the body takes precedence over the header."""
        stated_ms = timings_ms(body) if self.is_images else math.nan
        return head.server_ms if math.isnan(stated_ms) else stated_ms


def judge_of(scenario: Scenario) -> Judge:
    """Return the scenario's check, by default one for the usual response of its API. `raw` has no default check."""
    check, api = scenario.target.check, scenario.target.api
    is_default = check == ResponseCheck()
    if is_default and api == "raw":
        return Judge(keeps_body=False, accepts=lambda _: True, is_images=False)
    if is_default:
        return Judge(keeps_body=True, accepts=_Marked(_MARKS[api]), is_images=api == "images")
    return Judge(keeps_body=True, accepts=_Checked(check), is_images=api == "images")


@dataclass(frozen=True, slots=True)
class _Marked:
    marks: tuple[bytes, ...]

    def __call__(self, body: bytes) -> bool:
        return any(mark in body for mark in self.marks)


@dataclass(frozen=True, slots=True)
class _Checked:
    check: ResponseCheck

    def __call__(self, body: bytes) -> bool:
        check = self.check
        if len(body) < check.least_bytes:
            return False
        if check.contains is not None and check.contains.encode() not in body:
            return False
        return check.json_path is None or has_path(body, check.json_path)


def has_path(body: bytes, path: str) -> bool:
    """Return whether the JSON `body` has something at a dotted path (numbers index lists); False if it is not JSON."""
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return False
    for step in path.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return False
    return True


def timings_ms(body: bytes) -> float:
    """Return the milliseconds of the last `"timings": {stage: seconds}` object: its `total`, or the sum; nan without
    one.

    Only that object is parsed: base64 images precede it.
    """
    at = body.rfind(_TIMINGS)
    if at < 0:
        return math.nan
    start = body.find(b"{", at, at + len(_TIMINGS) + 8)
    end = body.find(b"}", start)
    if start < 0 or end < 0:
        return math.nan
    try:
        stages = json.loads(body[start : end + 1])
        seconds = stages["total"] if "total" in stages else sum(stages.values())
        return float(seconds) * 1000.0
    except (ValueError, TypeError, RecursionError):
        return math.nan
