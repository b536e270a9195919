"""One HTTP request, without a library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """Whatever its status."""

    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        """The body; None if there is none."""
        return json.loads(self.text or "null")


def ask(url: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout_s: float = 120) -> Answer:
    """GET; POST, if there is a body, which is sent as JSON unless it is bytes. Raises OSError where nothing answers."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    given = {"content-type": "application/json", **(headers or {})}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, data=data, headers=given), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return Answer(answer.status, answer.headers, answer.read().decode(errors="replace"))
