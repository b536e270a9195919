"""The table that turns errors into answers, and the answers' form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_disagg import errors as rank
from plait_serving.diffusion import errors as engine
from plait_serving.http.edge.errors import ANSWERS, PARAM_MAX_CHARS, RANK_ANSWERS, ApiError, wire_error

CASES = [
    (engine.RequestError("m", param="size"), 400, "size", "invalid_value", {}),
    (engine.NotFound("m"), 404, None, "not_found", {}),
    (engine.Overloaded("m", retry_after_s=7.2), 429, None, "overloaded", {"retry-after": "8"}),
    (engine.Overloaded("m"), 429, None, "overloaded", {"retry-after": "5"}),
    (engine.Overloaded("m", retry_after_s=9000.0), 429, None, "overloaded", {"retry-after": "120"}),
    (engine.Overloaded("m", retry_after_s=float("inf")), 429, None, "overloaded", {"retry-after": "5"}),
    (engine.Overloaded("m", retry_after_s=-5.0), 429, None, "overloaded", {"retry-after": "1"}),
    (engine.DeadlineMissed("m"), 504, "deadline_ms", "deadline_missed", {"x-should-retry": "false"}),
    (engine.Cancelled("m"), 499, None, "cancelled", {}),
    (engine.LoraError("m"), 422, "loras", "invalid_lora", {}),
    (engine.ModelError("m"), 500, None, "invalid_model", {"x-should-retry": "false"}),
    (engine.ControlNetUnavailable("m"), 503, "controlnets", "controlnet_unavailable", {"retry-after": "5"}),
    (engine.NumericalError("m"), 500, None, "numerical_error", {"x-should-retry": "false"}),
    (engine.OutOfMemory("m"), 422, "size", "out_of_memory", {}),
    (engine.EngineStopped("m"), 503, None, "engine_stopped", {"retry-after": "5"}),
    (engine.Refused("m"), 503, None, "refused", {"retry-after": "5"}),
    (engine.KillsReplicas("m"), 422, None, "request_kills_replicas", {}),
    (engine.EngineError("m"), 500, None, "engine_error", {"x-should-retry": "false"}),
    (rank.Busy("m"), 429, None, "overloaded", {"retry-after": "1"}),
    (rank.DeadlinePassed("m"), 504, "deadline_ms", "deadline_missed", {"x-should-retry": "false"}),
    (rank.WorkerUnavailable("m"), 503, None, "worker_unavailable", {"retry-after": "1"}),
    (rank.WorkerUnavailable("m", retry_after_s=11.2), 503, None, "worker_unavailable", {"retry-after": "12"}),
    (rank.WorkerUnavailable("m", retry_after_s=400.0), 503, None, "worker_unavailable", {"retry-after": "120"}),
    (rank.RankError("m"), 500, None, "rank_failed", {"x-should-retry": "false"}),
]


KINDS = {429: "rate_limit_error", 504: "timeout_error"}


@pytest.mark.parametrize(("error", "status", "param", "code", "headers"), CASES, ids=lambda value: type(value).__name__)
def test_every_error_has_its_answer(error, status, param, code, headers):
    """Status, param, code and retry headers of each error class are as the table says."""
    wire = wire_error(error)
    assert (wire.status, wire.param, wire.code, dict(wire.headers)) == (status, param, code, headers)
    kind = KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    assert json.loads(wire.body) == {"error": {"message": "m", "type": kind, "param": param, "code": code}}


@pytest.mark.parametrize(
    ("table", "module", "base"), [(ANSWERS, engine, engine.EngineError), (RANK_ANSWERS, rank, rank.RankError)]
)
def test_a_table_names_every_error_class_before_its_bases(table, module, base):
    """No error class is forgotten, and none is hidden by a base class that comes earlier."""
    order = [kind for kind, *_ in table]
    kinds = {kind for kind in vars(module).values() if isinstance(kind, type)}
    assert {kind for kind in kinds if issubclass(kind, base)} <= set(order)
    for i, kind in enumerate(order):
        assert not any(issubclass(kind, earlier) for earlier in order[:i])


@given(st.text(), st.text(st.characters()))
def test_any_text_fits_into_an_error(message, param):
    """Lone surrogates, control characters and long names of fields never break the answer."""
    wire = wire_error(ApiError(400, message, code="x", param=param + "\ud800"))
    decoded = json.loads(wire.body.decode("ascii"))["error"]
    assert decoded["message"] == message
    assert len(decoded["param"]) <= PARAM_MAX_CHARS + 3
