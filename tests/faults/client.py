"""The client of the runs: a request sent over HTTP, and what became of it. All calls to httpx2 are made here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2

from faults.asks import Ask

__all__ = ["FaultClient", "Reply"]

_CONNECT_S = 10.0
_KEPT_S = 2.0
"""How long an idle connection is used again: shorter than any server keeps it, so that none closes under a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of a request. `status` is None if no response began; `failure`: how the connection broke.

    `is_hung`: it did not end in time; `has_left`: we closed the connection on purpose. Times are of `time.monotonic`.
    """

    began_s: float
    ended_s: float
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    failure: str | None = None
    is_hung: bool = False
    has_left: bool = False

    @property
    def taken_s(self) -> float:
        """The seconds until its end."""
        return self.ended_s - self.began_s


class FaultClient:
    """Sends requests to one server. A request that has not ended after `hung_s` counts as hung."""

    def __init__(self, url: str, *, hung_s: float, key: str | None = None) -> None:
        self._url = url
        self._hung_s = hung_s
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEPT_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def send(self, ask: Ask, *, leave_after_s: float | None = None) -> Reply:
        """Send a request and wait for its end; with `leave_after_s` disconnect then, if it has not ended."""
        began_s = time.monotonic()
        facts: dict[str, Any] = {}
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self._hung_s if leave_after_s is None else leave_after_s):
                async with self._http.stream(
                    "POST", self._url + ask.path, content=ask.body, headers=self._headers
                ) as response:
                    facts |= {"status": response.status_code, "headers": dict(response.headers)}
                    async for piece in response.aiter_bytes():
                        pieces.append(piece)  # noqa: PERF401  # what came before a break is kept
        except TimeoutError:
            facts |= {"is_hung": leave_after_s is None, "has_left": leave_after_s is not None}
        except httpx2.TransportError as error:
            facts["failure"] = f"{type(error).__name__}: {error}"
        return Reply(began_s=began_s, ended_s=time.monotonic(), body=b"".join(pieces), **facts)

    async def get(self, path: str, *, timeout_s: float = 30.0) -> httpx2.Response:
        """GET. Raises `httpx2.TransportError`."""
        return await self._http.get(self._url + path, headers=self._headers, timeout=timeout_s)
