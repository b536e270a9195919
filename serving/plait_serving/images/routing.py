"""Which engine replica a request goes to: the one where it would begin first. Pure.

A replica says about once a second what waits there and which base models and LoRAs it has. A request for a model that
it has begins when the queue is done; one for another model also has to wait for that to be loaded, and the one that
makes room has to be loaded again. So models stay where they are, and one that is asked for more than its replica can
serve is loaded on another as well. What was sent since a replica spoke is added to what it said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

_THERE_AND_BACK = 2.0
_UNKNOWN_LOAD_S = 1.0
_LORA_S = 0.2
"""What fetching a LoRA file is thought to take: less than any queue, enough to decide between equal ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What a replica said. `models`: those that it has, or will have loaded for what waits; `load_s`: the seconds that
    loading each takes; `request_s`: the compute-seconds of a usual request of each; `number` grows with each report."""

    number: int = 0
    queued_s: float = 0.0
    models: frozenset[str] = frozenset()
    loras: frozenset[str] = frozenset()
    load_s: Mapping[str, float] = field(default_factory=dict)
    request_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, report: Mapping[str, Any]) -> ReplicaState:
        """Read `report`; of a replica that has not spoken yet nothing is known."""
        return _PLAIN.validate_python(report)

    def report(self) -> Mapping[str, Any]:
        """Return it as plain values."""
        return _PLAIN.dump_python(self, mode="json")  # type: ignore[no-any-return]


_PLAIN = TypeAdapter(ReplicaState)


def begins_in_s(state: ReplicaState, model: str, loras: Collection[str]) -> float:
    """Return in how many seconds a request would begin there, with what it takes from others."""
    seconds = state.queued_s + _LORA_S * len(set(loras) - state.loras)
    if model not in state.models:
        seconds += _THERE_AND_BACK * state.load_s.get(model, _UNKNOWN_LOAD_S)
    return seconds


class SentRequests:
    """What one sender sent to one replica, until the replica has spoken twice since: its first report may have been
    made before the request arrived."""

    def __init__(self) -> None:
        self._state = ReplicaState()
        self._reports = 0
        self._sent: list[tuple[int, str, float]] = []

    def hear(self, state: ReplicaState) -> None:
        """Take the newest report, or one that is known."""
        if state.number != self._state.number:
            self._reports += 1
            self._sent = [one for one in self._sent if one[0] > self._reports - 2]
        self._state = state

    def add(self, model: str) -> None:
        """Record that a request was sent."""
        now = self.state
        work_s = now.request_s.get(model, 0.0)
        if model not in now.models:
            work_s += now.load_s.get(model, _UNKNOWN_LOAD_S)
        self._sent.append((self._reports, model, work_s))

    @property
    def state(self) -> ReplicaState:
        """What the replica said, with what was sent since."""
        said = self._state
        queued_s = said.queued_s + sum(work_s for _, _, work_s in self._sent)
        return replace(said, queued_s=queued_s, models=said.models | {model for _, model, _ in self._sent})
