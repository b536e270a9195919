"""The table that turns errors into answers, and the answers' form."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_disagg.errors import WorkerUnavailable
from plait_serving.diffusion import errors as engine
from plait_serving.http.app import validation_error
from plait_serving.http.edge.errors import ANSWERS, PARAM_MAX_CHARS, ApiError, wire_error

CASES = [
    (engine.RequestError("m", param="size"), 400, "size", "invalid_value", {}),
    (engine.NotFound("m", param="model"), 404, "model", "model_not_found", {}),
    (engine.NotFound("m", param="loras.3.name"), 404, "loras.3.name", "lora_not_found", {}),
    (engine.NotFound("m", param="controlnets.0.name"), 404, "controlnets.0.name", "controlnet_not_found", {}),
    (engine.NotFound("m"), 404, None, "not_found", {}),
    (engine.Overloaded("m", retry_after_s=7.2), 429, None, "overloaded", {"retry-after": "8"}),
    (engine.Overloaded("m"), 429, None, "overloaded", {"retry-after": "5"}),
    (engine.Overloaded("m", retry_after_s=0.01), 429, None, "overloaded", {"retry-after": "1"}),
    (engine.Overloaded("m", retry_after_s=9000.0), 429, None, "overloaded", {"retry-after": "120"}),
    (engine.Overloaded("m", retry_after_s=float("inf")), 429, None, "overloaded", {"retry-after": "5"}),
    (engine.Overloaded("m", retry_after_s=float("nan")), 429, None, "overloaded", {"retry-after": "5"}),
    (engine.Overloaded("m", retry_after_s=-5.0), 429, None, "overloaded", {"retry-after": "1"}),
    (engine.DeadlineMissed("m"), 504, "deadline_ms", "deadline_missed", {"x-should-retry": "false"}),
    (engine.Refused("m", retry_after_s=3.0), 503, None, "refused", {"retry-after": "3"}),
    (engine.Cancelled("m"), 499, None, "cancelled", {}),
    (engine.LoraError("m"), 422, "loras", "invalid_lora", {}),
    (engine.LoraError("m", param="loras.1.name"), 422, "loras.1.name", "invalid_lora", {}),
    (engine.ModelError("m"), 500, None, "invalid_model", {"x-should-retry": "false"}),
    (engine.ControlNetUnavailable("m"), 503, "controlnets", "controlnet_unavailable", {"retry-after": "5"}),
    (engine.NumericalError("m"), 500, None, "numerical_error", {"x-should-retry": "false"}),
    (engine.OutOfMemory("m"), 422, "size", "out_of_memory", {}),
    (engine.EngineStopped("m"), 503, None, "engine_stopped", {"retry-after": "5"}),
    (engine.EngineStopped("m", retry_after_s=23.4), 503, None, "engine_stopped", {"retry-after": "24"}),
    (engine.KillsReplicas("m"), 422, None, "request_kills_replicas", {}),
    (engine.EngineError("m"), 500, None, "engine_error", {"x-should-retry": "false"}),
]


@pytest.mark.parametrize(("error", "status", "param", "code", "headers"), CASES, ids=lambda value: type(value).__name__)
def test_every_engine_error_has_its_answer(error, status, param, code, headers):
    """Status, param, code and retry headers of each error class are as the table says."""
    wire = wire_error(error)
    assert (wire.status, wire.param, wire.code, dict(wire.headers)) == (status, param, code, headers)
    assert json.loads(wire.body) == {"error": {"message": "m", "type": wire.kind, "param": param, "code": code}}


def _all_subclasses(kind):
    return {kind}.union(*(_all_subclasses(sub) for sub in kind.__subclasses__())) if kind.__subclasses__() else {kind}


def test_the_table_names_every_error_class_before_its_bases():
    """No error class of the engine is forgotten, and none is hidden by a base class that comes earlier."""
    order = [kind for kind, _ in ANSWERS]
    assert set(order) == {kind for kind in _all_subclasses(engine.EngineError) if kind.__module__ == engine.__name__}
    for i, kind in enumerate(order):
        assert not any(issubclass(kind, earlier) for earlier in order[:i])


@pytest.mark.parametrize(("retry_after_s", "header"), [(None, "1"), (11.2, "12"), (400.0, "120")])
def test_a_lost_worker_is_back_when_its_client_expects_it(retry_after_s, header):
    """Not within the second that a busy one needs (finding 10)."""
    wire = wire_error(WorkerUnavailable("m", retry_after_s=retry_after_s))
    assert (wire.status, wire.headers["retry-after"]) == (503, header)


def test_an_unexpected_error_is_logged_and_not_told(caplog):
    """A bug's text stays in the log."""
    with caplog.at_level(logging.ERROR):
        wire = wire_error(ZeroDivisionError("secret path /srv/keys"))
    assert wire.status == 500
    assert wire.code == "internal_error"
    assert b"secret" not in wire.body
    assert "secret" in caplog.text


@given(st.text(), st.text(st.characters()))
def test_any_text_fits_into_an_error(message, param):
    """Lone surrogates, control characters and long names of fields never break the answer."""
    wire = wire_error(ApiError(400, message, code="x", param=param + "\ud800"))
    decoded = json.loads(wire.body.decode("ascii"))["error"]
    assert decoded["message"] == message
    assert len(decoded["param"]) <= PARAM_MAX_CHARS + 3


def test_the_first_of_several_problems_is_named_and_the_rest_counted():
    """One param per answer, but the message says that there is more to fix."""
    errors = [
        {"type": "missing", "loc": ("body", "prompt"), "msg": "Field required"},
        {"type": "int_type", "loc": ("body", "n"), "msg": "Input should be a valid integer"},
    ]
    error = validation_error(errors)
    assert error.param == "prompt"
    assert error.message == "prompt: must be given (and 1 more)"
