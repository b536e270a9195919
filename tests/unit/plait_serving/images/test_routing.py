"""Which engine replica a request goes to, by what the replicas said and what was sent since."""

from __future__ import annotations

import json

from plait_serving.images.routing import ReplicaState, SentRequests, begins_in_s

LOADS = {"a": 3.0, "b": 3.0}


def said(number: int = 1, **more) -> ReplicaState:
    return ReplicaState(**{"number": number, "load_s": LOADS, "request_s": {"a": 2.0, "b": 2.0}, **more})


def best(states: dict[str, ReplicaState], model: str, loras=()) -> str:
    return min(states, key=lambda name: begins_in_s(states[name], model, loras))


def test_a_request_goes_where_its_model_is_unless_the_queue_there_is_worse_than_a_load():
    """There and back: the model that makes room elsewhere has to be loaded again."""
    idle, queued = said(models=frozenset("b")), said(models=frozenset("a"), queued_s=5.9)
    assert best({"idle": idle, "queued": queued}, "a") == "queued"
    assert best({"idle": idle, "queued": said(models=frozenset("a"), queued_s=6.1)}, "a") == "idle"


def test_of_equal_replicas_the_one_that_has_the_lora_is_chosen():
    """A file that is there need not be fetched."""
    states = {"bare": said(models=frozenset("a")), "has": said(models=frozenset("a"), loras=frozenset({"noto"}))}
    assert best(states, "a", ("noto",)) == "has"


def test_what_was_sent_counts_until_the_replica_has_spoken_twice():
    """A burst between two reports is spread, and nothing is counted for ever."""
    sent = SentRequests()
    sent.hear(said())
    sent.add("a")
    sent.add("a")
    assert (sent.state.queued_s, sent.state.models) == (3.0 + 2.0 + 2.0, {"a"})
    sent.hear(said())
    assert sent.state.queued_s == 7.0
    sent.hear(said(2, models=frozenset("a"), queued_s=1.0))
    assert sent.state.queued_s == 8.0
    sent.hear(said(3, models=frozenset("a"), queued_s=1.0))
    assert sent.state.queued_s == 1.0


def test_a_report_survives_as_plain_values():
    """Serve carries it as JSON-like values; a replica that has not spoken yet is one of which nothing is known."""
    state = said(models=frozenset("ab"), loras=frozenset({"noto"}), queued_s=1.5)
    assert ReplicaState.parse(json.loads(json.dumps(state.report()))) == state
    assert ReplicaState.parse({}) == ReplicaState()
