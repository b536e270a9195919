"""How requests end. Pure: a reply and what happened meanwhile in, one of seven ends out.

Documented is what serving/docs/operations.md names ("How a request ends"): an error in the API's own form, with a
status and a code of `DOCUMENTED`. A stream breaks off where the ingress died with it, and nobody answers where the
proxy died: such ends are the proxy's, and only at the time of such a fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from faults.asks import Answer, Ask, StreamError, answer_of, difference
from faults.client import Reply

__all__ = ["DOCUMENTED", "ERROR_MEMBERS", "End", "Tally", "Verdict", "verdict_of"]

DOCUMENTED = frozenset(
    {
        (422, "request_kills_replicas"),
        (429, "overloaded"),
        (503, "controlnet_unavailable"),
        (503, "engine_stopped"),
        (503, "request_lost"),
        (503, "worker_unavailable"),
        (504, "deadline_missed"),
    }
)
"""The errors with which a valid request may end while something fails, or too much is asked."""

ERROR_MEMBERS = frozenset({"message", "type", "param", "code"})
"""What every error of the API says, in OpenAI's form."""

_RETRIED = frozenset({429, 503})
"""The statuses that say when to retry."""

_SHOWN_CHARS = 120


class End(StrEnum):
    """The end of a request."""

    RIGHT = "right"
    WRONG = "wrong"
    DOCUMENTED = "documented"
    PROXY = "proxy"
    UNDOCUMENTED = "undocumented"
    HUNG = "hung"
    DISCONNECTED = "disconnected"


FAILED = frozenset({End.WRONG, End.UNDOCUMENTED, End.HUNG})
"""The ends that no request may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An end and, for people, what exactly was seen."""

    end: End
    what: str = ""


def verdict_of(ask: Ask, reply: Reply, expected: Answer | None, *, in_our_stead: bool) -> Verdict:
    """Return the end of a request. `expected` None: any whole answer is right. `in_our_stead`: whether the ingress or
    Serve's proxy failed while it was in flight, so that the proxy, or nobody, had to answer."""
    if reply.is_hung:
        return Verdict(end=End.HUNG, what=f"no end after {reply.taken_s:.0f} s (status {reply.status})")
    if reply.has_left:
        return Verdict(end=End.DISCONNECTED)
    theirs = End.PROXY if in_our_stead else End.UNDOCUMENTED
    if reply.failure is not None:
        began = "no response" if reply.status is None else f"a response with status {reply.status} that broke off"
        return Verdict(end=theirs, what=f"{began}: {reply.failure.partition(':')[0]}")
    if reply.status == 200:
        return _answered(ask, reply, expected, theirs)
    return _refused(ask, reply.status or 0, reply.headers, reply.body)


def _answered(ask: Ask, reply: Reply, expected: Answer | None, theirs: End) -> Verdict:
    try:
        got = answer_of(ask, reply.body)
    except StreamError as error:
        return _coded(reply.status or 0, error.error.get("error"), has_retry=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        if ask.form == "stream" and theirs is End.PROXY:
            return Verdict(end=theirs, what="a stream that was cut")
        return Verdict(end=End.WRONG, what=f"{ask.key}: {error!r}"[:_SHOWN_CHARS])
    why = None if expected is None else difference(ask, expected, got)
    return Verdict(end=End.RIGHT) if why is None else Verdict(end=End.WRONG, what=f"{ask.key}: {why}")


def _refused(ask: Ask, status: int, headers: Mapping[str, str], body: bytes) -> Verdict:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        kind = headers.get("content-type", "no content type")
        shown = body.decode(errors="replace")[:_SHOWN_CHARS]
        return Verdict(end=End.UNDOCUMENTED, what=f"{status} {kind}: {shown}")
    has_retry = status not in _RETRIED or headers.get("retry-after", "").isdigit()
    if ask.form == "v2":  # its errors have a message and no code
        is_known = isinstance(error, str) and status in {known for known, _ in DOCUMENTED} and has_retry
        return Verdict(end=End.DOCUMENTED if is_known else End.UNDOCUMENTED, what=f"{status} (v2)")
    return _coded(status, error, has_retry=has_retry)


def _coded(status: int, error: Any, *, has_retry: bool) -> Verdict:
    """Judge an error in OpenAI's form; one that ends a stream has no status of its own."""
    if not isinstance(error, dict) or set(error) != ERROR_MEMBERS:
        return Verdict(end=End.UNDOCUMENTED, what=f"{status} in no known form: {error}"[:_SHOWN_CHARS])
    code = error["code"]
    what = f"{status} {code}"
    if status == 200:
        is_known = code in {known for _, known in DOCUMENTED}
        return Verdict(end=End.DOCUMENTED if is_known else End.UNDOCUMENTED, what=what)
    if not has_retry:
        return Verdict(end=End.UNDOCUMENTED, what=f"{what} without retry-after")
    return Verdict(end=End.DOCUMENTED if (status, code) in DOCUMENTED else End.UNDOCUMENTED, what=what)


@dataclass(slots=True, kw_only=True)
class Tally:
    """Ends, counted. `seen`: what was seen of all ends but the right ones."""

    ends: Counter[End] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self.ends[verdict.end] += 1
        if verdict.what:
            self.seen[f"{verdict.end}: {verdict.what}"] += 1

    @property
    def total(self) -> int:
        """The number of requests."""
        return self.ends.total()

    @property
    def failed(self) -> int:
        """The number of requests that ended as none may."""
        return sum(self.ends[end] for end in FAILED)

    @property
    def right_share(self) -> float:
        """The share of right answers among the requests that we did not leave."""
        stayed = self.total - self.ends[End.DISCONNECTED]
        return self.ends[End.RIGHT] / stayed if stayed else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the counts by end, and by what was seen."""
        counts = {end.value: self.ends[end] for end in End}
        return {"requests": self.total, **counts, "seen": dict(self.seen.most_common())}


def tally(verdicts: Iterable[Verdict]) -> Tally:
    """Count the verdicts."""
    found = Tally()
    for verdict in verdicts:
        found.add(verdict)
    return found
