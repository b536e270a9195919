"""Whether a response with a good status is a success, and the server's own timing. Evaluated only where the scenario
needs it.

Checks run after the last byte was stamped, on the loop: a JSON path of a large body costs milliseconds that appear
as send lag of other requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from plait_loadtest.scenario import ResponseCheck, Scenario
from plait_loadtest.wire.answers import AnswerFacts, look_at_images, look_at_outputs, look_at_stream
from plait_loadtest.wire.framing import Head


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
