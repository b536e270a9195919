"""The OpenAPI document as it is true: FastAPI knows the routes and their bodies, this adds how each request can end.

Keys, host names, body sizes and the errors of the services are handled around the routes, so FastAPI cannot see them;
what it documents itself (a 422 with a list of errors) is never sent. Generators of typed clients take an answer's first
content, and a parameter in a path for one that is always there: so JSON comes first, and no such parameter is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait_serving.http.edge.auth import is_open
from plait_serving.http.edge.errors import V2, ErrorBody
from plait_serving.http.edge.refusals import IMAGE_PATHS
from plait_serving.http.edge.request_id import ACCEPTED

_MEANINGS = {
    400: "The request is invalid; `param` names the field.",
    401: "A key is missing or not valid.",
    403: "The key may not do this, or the server does not answer to that host name.",
    404: "Something that the request names does not exist.",
    409: "The state of what it names does not allow it.",
    413: "The body is too large.",
    414: "The query is too long.",
    415: "The body's encoding or type is not understood.",
    422: "The request cannot be done here: a LoRA file cannot be used, or the images do not fit the device.",
    429: "Too many requests; the same one may succeed after `retry-after` seconds.",
    500: "The server failed; the same request would fail again.",
    503: "Something is being started; the same request may succeed after `retry-after` seconds.",
    504: "The deadline passed, or cannot be met.",
}

_ANYWHERE = (403, 413, 414, 429, 500)
"""What any operation can answer."""

_SQUARE = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQAAAACCEkxzAAAAFElEQVR42mP8zwABTAyjjFEGyQwAzx8Bf7QK4E8AAAAASUVORK5CYII="
"""A white PNG of 64x64."""

_EXAMPLES: Mapping[str, Any] = {
    "/v1/images/generations": {"prompt": "red apple", "seed": 1},
    "/v1/images/edits": {"prompt": "red apple", "image": _SQUARE, "seed": 1},
    "/v1/images/control_maps": {"name": "edges", "image": _SQUARE},
    "/v2/repository/models/{model}/load": {"parameters": {"update": "/srv/updates/1"}},
}
"""A first JSON body of each path. What a ranking model takes, it says itself (`ranking/describe.py`)."""

_REQUEST_ID = {
    "x-request-id": {"description": "the request's id, in the server's log too", "schema": {"type": "string"}},
}
_OWN_ID = {
    "name": "x-request-id", "in": "header", "required": False,
    "description": "the request's id, in its answer and in the server's log; ignored if it has other characters",
    "schema": {"type": "string", "pattern": f"^{ACCEPTED.pattern}$"},
}  # fmt: skip
_RETRY_AFTER = {
    "retry-after": {
        "description": "seconds",
        "required": True,
        "schema": {"type": "integer", "minimum": 1, "maximum": 120},
    }
}


def complete(document: dict[str, Any], examples: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Add to FastAPI's document, in place, what it cannot know. `examples`: more first bodies, by path; `names`: what
    their parameters may be."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name, schema in _error_schemas().items():
        schemas.setdefault(name, schema)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "needed only where the server has keys"}
    }
    for path, operation in ((path, it) for path, item in document["paths"].items() for it in item.values()):
        if not is_open(path):
            operation.setdefault("security", [{"key": []}, {}])
        operation["responses"] = _responses(path, operation)
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path" and "anyOf" in parameter["schema"]:
                parameter["schema"] = parameter["schema"]["anyOf"][0]
            if parameter["name"] in names and parameter["in"] == "path":
                parameter["example"] = names[parameter["name"]]
        if (body := operation.get("requestBody")) is None:
            continue
        operation.setdefault("parameters", []).append(_OWN_ID)
        if (example := {**_EXAMPLES, **examples}.get(path)) is not None:
            body["content"]["application/json"]["example"] = example


def _error_schemas() -> dict[str, Any]:
    error = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
    detail = error.pop("$defs")["ErrorDetail"]
    message = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    return {"ErrorBody": error, "ErrorDetail": detail, "ErrorMessage": {"title": "ErrorMessage", **message}}


def _responses(path: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation's answers: its own ones but for the placeholders of FastAPI, and the errors."""
    known = operation.get("responses", {})
    found = {code: answer for code, answer in known.items() if code.isdigit() and code != "422"}
    for status in _statuses(path, operation):
        found.setdefault(str(status), _error(status, below_v2=path == V2 or path.startswith(V2 + "/")))
    for answer in found.values():
        answer["headers"] = {**_REQUEST_ID, **answer.get("headers", {})}
        content = answer.get("content", {})
        if "application/json" in content:
            answer["content"] = {"application/json": content["application/json"], **content}
    return dict(sorted(found.items()))


def _statuses(path: str, operation: Mapping[str, Any]) -> set[int]:
    """Return what an operation can answer beside what it says itself: it follows from what it takes and does."""
    is_read = "requestBody" in operation or any(it["in"] != "path" for it in operation.get("parameters", ()))
    makes_images = path in IMAGE_PATHS
    waits = makes_images or path == "/v1/recommend" or path.endswith("/infer")
    rules = {
        400: is_read or path.endswith("/events"),  # which read `last-event-id`
        401: not is_open(path),
        404: "{" in path or waits or path.startswith("/v1/images/"),
        409: path.endswith("/cancel"),
        415: not path.endswith("/infer"),  # which reads some encodings
        422: makes_images,
        503: (path.startswith("/v1/") and path != "/v1/words") or "{model}" in path,
        504: waits,
    }
    return {*_ANYWHERE, *(status for status, holds in rules.items() if holds)}


def _error(status: int, *, below_v2: bool) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{'ErrorMessage' if below_v2 else 'ErrorBody'}"}
    answer: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {"application/json": {"schema": schema}},
    }
    if status in (429, 503):
        answer["headers"] = dict(_RETRY_AFTER)
    return answer
