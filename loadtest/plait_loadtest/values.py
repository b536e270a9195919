"""The values that planning, running and measuring exchange. numpy only.

Times are nanoseconds since the start of the run (an instant that all worker processes share), int64; -1: never came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class RequestOutcome(IntEnum):
    """How a request ended. Stored as uint8; the names in lower case are the error classes of reports."""

    OK = 0
    NOT_SENT = 1  # a limit of the generator or of its machine left no room for it
    CONNECT = 2  # refused, unreachable, TLS failed
    DNS = 3
    TIMEOUT = 4
    RESET = 5  # the connection ended before any byte of a response
    TRUNCATED = 6  # the response ended before its announced length, or its last chunk
    GARBLED = 7  # what came is not HTTP, or larger than the response limit
    HTTP_4XX = 8
    HTTP_5XX = 9
    HTTP_OTHER = 10  # neither 2xx, 4xx nor 5xx
    CHECK = 11  # the response check of the scenario failed
    CANCELLED = 12  # on purpose, by the scenario's cancellation rate; no error
    INTERRUPTED = 13  # the run was ended early, while it was in flight or before it was due; nobody knows its end
    UNFINISHED = 14  # it had not ended when the drain time was over


NO_ERROR = frozenset({RequestOutcome.OK, RequestOutcome.CANCELLED})

RECORD = np.dtype(
    [
        ("index", np.uint32),  # position in the plan
        ("kind", np.uint16),  # index of the request class in the scenario's mix
        ("outcome", np.uint8),
        ("warm_up", np.bool_),  # scheduled before the measured part began
        ("status", np.uint16),  # HTTP status, 0: none came
        ("scheduled_ns", np.int64),
        ("sent_ns", np.int64),  # the request was handed to the socket
        ("first_byte_ns", np.int64),  # of the response
        ("first_part_ns", np.int64),  # first server-sent event of a streamed response
        ("done_ns", np.int64),  # the last byte of the response, or when it was given up
        ("sent_bytes", np.uint32),
        ("received_bytes", np.uint32),
        ("server_ms", np.float32),  # what the server says it took; nan: it says nothing
        ("images", np.uint16),  # that the answer held, whatever was asked for
        ("why", np.uint16),  # it failed: an index of the run's `whys`, 0 for none
    ]
)
"""One request. A run's records are one array of this dtype, in order of `index`."""

Records = npt.NDArray[np.void]


class Failure(NamedTuple):
    """How and why something could not be done; `why` is one clause for people."""

    outcome: RequestOutcome
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """One request, ready to be sent. `path` starts with a slash and includes the query.

    `headers` holds what the request itself needs (content type, ...); host, length and the scenario's are added.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """One generator host's part of a run: every `hosts`-th request of the plan, from `rank` (0 to `hosts` - 1) on."""

    rank: int = 0
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.rank + 1}/{self.hosts}"


WHOLE = HostPart()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Echo:
    """Control requests to the generator's own echo: what this machine adds to every latency.

    Nanoseconds from its scheduled time to its reply, one per control request, warm-up included; int64 (M,).
    """

    scheduled_ns: npt.NDArray[np.int64]
    latency_ns: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunResult:
    """The result of a run. `started_unix_s`: the instant that all record times count from.

    `cpu_s`: processor time of the generator's processes. `interrupted`: it ended early, by Ctrl-C or because it was
    `abandoned`, which says why. `reconnects`: requests whose kept-alive connection the server had closed before they
    reached it, so that they left on a new one. `limits` of the generator that were met, and `problems`: errors on its
    side, one sentence each; a run with any is not valid. `whys`: what `why` of the records counts.
    """

    records: Records
    echo: Echo
    started_unix_s: float
    wall_s: float
    cpu_s: float
    interrupted: bool
    reconnects: int = 0
    limits: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    abandoned: str = ""
    whys: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests by now: `handed` were due, `done` ended, as `ok` or `errors`; `in_flight` have been sent and not ended,
    `waiting` are due and have no connection yet."""

    handed: int
    done: int
    ok: int
    errors: int
    in_flight: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress(RequestCounts):
    """The progress of a run, reported a few times a second.

    `planned`: requests of the plan, None in a closed loop. `recent_p50_ms`, `recent_p95_ms`: latencies of requests
    that ended since the last report; None: none did. `elapsed_s` is negative while requests are being prepared.
    """

    elapsed_s: float
    planned: int | None
    recent_p50_ms: float | None
    recent_p95_ms: float | None


OnProgress = Callable[[RunProgress], None]

StopWhen = Callable[[RunProgress], str | None]
"""Called a few times a second while the load runs; a string that it returns ends the run early and gives the reason."""
