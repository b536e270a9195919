"""Every error that leaves the server, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`. Paths below
`/v2` use the form of the Open Inference Protocol instead: `{"error": "message"}`; those below `/sdapi` A1111's, whose
clients read `detail`.

Two tables map the errors of the engine and of ranking to HTTP responses. The `openai` client retries 408, 409, 429
and 5xx twice by itself, waiting `retry-after` seconds (honoured up to 120; above that it gives up), unless
`x-should-retry` overrides that. So every refusal states which it wants:

* overload is 429 with `retry-after`: the same request can succeed a little later;
* a missed deadline is 504 with `x-should-retry: false`: by its deadline, a later image is worthless to the client.
  (Not 408: that blames the client for sending slowly, and browsers retry it silently.)
* an image that turned NaN is 500 with `x-should-retry: false`: the same seed gives the same NaN;
* a request that alone does not fit the device, names a LoRA file that cannot be used, or was there when two engine
  replicas died one after the other, is 422: change it;
* a service that stops or lost a worker is 503 with `retry-after`: when it is likely to be back, by how long such a
  start took before.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from plait_disagg import errors as rank
from plait_serving.diffusion import errors as engine
from plait_serving.ranking.codec import TooLarge

log = logging.getLogger(__name__)

RETRY_AFTER_DEFAULT_S = 5.0
RANK_RETRY_AFTER_S = 1.0  # a queue of requests of milliseconds is short again within a second
RETRY_AFTER_MAX_S = 120.0  # above it the openai client does not repeat at all
PARAM_MAX_CHARS = 200

V2 = "/v2"
"""The prefix of paths that follow the Open Inference Protocol."""
A1111 = "/sdapi/"
"""What the paths of A1111's API begin with."""

_KINDS = {
    401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error",
    504: "timeout_error",
}  # fmt: skip
"""OpenAI's name for what is wrong, by status; of any other it is the request, or from 500 on the server."""


class ErrorDetail(BaseModel):
    """`param` is dotted, for example `loras.0.name`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every 4xx and 5xx response."""

    error: ErrorDetail


class ApiError(Exception):
    """An error ready for the wire: status and headers for a whole response, `body` also for an event of a stream. The
    HTTP side raises it for what it decides itself (authentication, body size, unknown route)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.param = param
        if param is not None and len(param) > PARAM_MAX_CHARS:
            self.param = param[:PARAM_MAX_CHARS] + "..."
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """ASCII JSON, so no input (lone surrogates in a field's name) can break it."""
        return _json({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})

    def response(self, path: str) -> Response:
        """Return the whole HTTP response to a request for `path`, which decides the form."""
        body = self.body
        if path == V2 or path.startswith(V2 + "/"):
            body = _json({"error": self.message})
        elif path.startswith(A1111):
            body = _json({"error": self.code, "detail": self.message, "body": "", "errors": self.message})
        return Response(body, status_code=self.status, headers=self.headers, media_type="application/json")


def _json(said: Mapping[str, object]) -> bytes:
    return json.dumps(said).encode("ascii")


class BodyRefused(HTTPException):
    """Raised while a body is read; an HTTPException because FastAPI lets only those through when it parses a body."""

    def __init__(self, error: ApiError | engine.EngineError) -> None:
        super().__init__(status_code=400)
        self.error = error


class ClientDisconnected(Exception):  # it is an event, nobody is left to read an error
    """The client closed the connection before its response was ready."""


# Most specific first; the first class that matches counts.
ANSWERS: tuple[tuple[type[engine.EngineError], int, str | None], ...] = (
    (engine.NotFound, 404, None),
    (engine.RequestError, 400, None),
    (engine.Overloaded, 429, None),
    (engine.DeadlineMissed, 504, "deadline_ms"),
    (engine.Refused, 503, None),
    (engine.Cancelled, 499, None),
    (engine.LoraError, 422, "loras"),
    (engine.ControlNetUnavailable, 503, "controlnets"),
    (engine.NumericalError, 500, None),
    (engine.OutOfMemory, 422, "size"),
    (engine.KillsReplicas, 422, None),
    (engine.ModelError, 500, None),
    (engine.EngineStopped, 503, None),
    (engine.EngineError, 500, None),
)
"""Each error class with its status, and the field that it is about unless it names one."""

RANK_ANSWERS: tuple[tuple[type[rank.RankError], int, str | None, str], ...] = (
    (rank.UnknownModel, 404, "model", "model_not_found"),
    (TooLarge, 413, None, "body_too_large"),
    (rank.BadInput, 400, None, "invalid_value"),
    (rank.Busy, 429, None, "overloaded"),
    (rank.DeadlinePassed, 504, "deadline_ms", "deadline_missed"),
    (rank.WorkerUnavailable, 503, None, "worker_unavailable"),
    (rank.RankError, 500, None, "rank_failed"),
)
"""The same with the code, which these have not themselves."""

_NO_RETRY = {"x-should-retry": "false"}
_NOT_FOUND_CODES = {
    "model": "model_not_found", "loras": "lora_not_found", "controlnets": "controlnet_not_found",
    "prompt": "lora_not_found",  # in a tag
}  # fmt: skip


def wire_error(error: BaseException) -> ApiError:
    """Return what a client receives for `error`. An unexpected one is logged with its traceback and sent without it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, engine.EngineError):
        code, usual_s = error.code, RETRY_AFTER_DEFAULT_S
        status, param = next((status, param) for kind, status, param in ANSWERS if isinstance(error, kind))
    elif isinstance(error, rank.RankError):
        usual_s = RANK_RETRY_AFTER_S
        status, param, code = next(answer[1:] for answer in RANK_ANSWERS if isinstance(error, answer[0]))
    else:
        log.error("unexpected error", exc_info=error)
        message = "internal error; the server's log has the details under this request id"
        return ApiError(500, message, code="internal_error", headers=_NO_RETRY)
    if status >= 500:
        log.warning("request failed: %s: %s", code, error.message)
    param = error.param or param
    if isinstance(error, engine.NotFound) and param is not None:
        code = _NOT_FOUND_CODES.get(param.partition(".")[0], code)
    headers = _NO_RETRY if status in (500, 504) else {}
    if status in (429, 503):
        told_s = error.retry_after_s
        wait_s = usual_s if told_s is None or not math.isfinite(told_s) else told_s
        headers = {"retry-after": str(math.ceil(min(max(wait_s, 1.0), RETRY_AFTER_MAX_S)))}
    return ApiError(status, error.message, code=code, param=param, headers=headers)
