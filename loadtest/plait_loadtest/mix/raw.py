"""Arbitrary requests: method, path and body as written; `{index}` becomes the request's number."""

from __future__ import annotations

from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import LoadTarget, RawClass
from plait_loadtest.values import PreparedRequest

_MARK = "{index}"


class RawRequests:
    """Builds the requests of one class; one without `{index}` is the same object each time."""

    def __init__(self, spec: RawClass, target: LoadTarget) -> None:
        self._method = spec.method
        self._path = (spec.path or target.path or "/").split(_MARK)
        self._body = _body(spec).split(_MARK.encode())
        more = tuple((name.lower(), value) for name, value in spec.headers.items())
        self._headers = ((("content-type", spec.content_type),) if self._body != [b""] else ()) + more
        self._constant = self._prepare(0) if len(self._path) == len(self._body) == 1 else None

    def build(self, index: int) -> PreparedRequest:
        """Return the request with its number filled in."""
        return self._constant or self._prepare(index)

    def _prepare(self, index: int) -> PreparedRequest:
        number = str(index)
        return PreparedRequest(
            method=self._method,
            path=number.join(self._path),
            headers=self._headers,
            body=number.encode().join(self._body),
        )

    def asked(self, index: int) -> int:  # noqa: ARG002
        """Return 0: what an answer should hold is the scenario's to say (`target.check`)."""
        return 0


def _body(spec: RawClass) -> bytes:
    if spec.body_file is None:
        return spec.body.encode()
    try:
        return spec.body_file.read_bytes()
    except OSError as error:
        raise ScenarioError(f"body_file: {spec.body_file} cannot be read: {error.strerror}") from error
