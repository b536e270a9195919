"""How quickly a server that is full says so: the latency of 429s, with many connections that ask without a pause.

The client is the load tester's, which costs a tenth of the processor time of httpx2: both share the server's cores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faults.asks import Ask, image_ask
from faults.run import Say
from faults.server import RunningServer
from plait_bench.summary import percentile
from plait_loadtest.scenario import LoadTarget
from plait_loadtest.values import PreparedRequest, RequestOutcome
from plait_loadtest.wire.dial import Dialler, RequestWriter, place_of
from plait_loadtest.wire.http1 import HttpConnection
from plait_loadtest.wire.pool import ConnectionPool, Rules, SendJob

__all__ = ["RefusalReport", "RefusalsPlan", "refusals_run", "refusals_text"]

MAX_P99_S = ((100, 1.0), (500, 2.0))
"""What is promised: the 99th percentile of refusals, by up to how many connections ask."""

_HEADERS = (("content-type", "application/json"),)
_BODY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalsPlan:
    """`queue_limit`: the knob that the server is started with."""

    seconds: float = 30.0
    connections: tuple[int, ...] = (100, 500)
    queue_limit: int = 8
    steps: int = 20
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalReport:
    """The refusals of one number of connections; `others`: how other requests ended, by outcome or status."""

    connections: int
    seconds: float
    refused: int
    p50_s: float
    p99_s: float
    others: dict[str, int]

    @property
    def misses(self) -> list[str]:
        """What is promised and was not so, in words."""
        limit_s = next((limit_s for count, limit_s in MAX_P99_S if self.connections <= count), float("inf"))
        if not self.refused:
            return ["nothing was refused"]
        return [f"p99 is {self.p99_s:.2f} s, more than {limit_s:g} s"] if self.p99_s > limit_s else []

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "connections": self.connections, "seconds": self.seconds, "refused": self.refused, "p50_s": self.p50_s,
            "p99_s": self.p99_s, "others": self.others, "misses": self.misses,
        }  # fmt: skip


async def refusals_run(server: RunningServer, plan: RefusalsPlan, say: Say) -> list[RefusalReport]:
    """Measure each number of connections in turn."""
    reports = []
    for connections in plan.connections:
        say(f"{connections} connections for {plan.seconds:g} s")
        reports.append(await _Closed(server.url, connections, plan).run())
    return reports


class _Closed:
    """Connections that ask again as soon as they have an answer."""

    def __init__(self, url: str, connections: int, plan: RefusalsPlan) -> None:
        place = place_of(url)
        ask = _ask(plan)
        prepared = PreparedRequest(method="POST", path=ask.path, headers=_HEADERS, body=ask.body)
        self._request = RequestWriter(place, {}).bytes_of(prepared)
        rules = Rules(
            room=connections, timeout_s=plan.timeout_s, cancel_after_s=1.0, keeps_body=False, limit_bytes=_BODY_BYTES
        )
        self._pool = ConnectionPool(Dialler(place, LoadTarget(url=url)).dial, rules, self._on_end)
        self._connections, self._plan = connections, plan
        self._asked_ns: dict[int, int] = {}
        self._refused_s: list[float] = []
        self._others: dict[str, int] = {}
        self._next = 0
        self._is_over = False
        self._all_ended = asyncio.Event()

    async def run(self) -> RefusalReport:
        """Ask for the plan's time, then wait for what was asked: the slowest answers are those that count."""
        for _ in range(self._connections):
            self._submit()
        await asyncio.sleep(self._plan.seconds)
        self._is_over = True
        if self._asked_ns:
            await self._all_ended.wait()
        self._pool.close()
        return RefusalReport(
            connections=self._connections,
            seconds=self._plan.seconds,
            refused=len(self._refused_s),
            p50_s=percentile(self._refused_s, 0.5) if self._refused_s else float("inf"),
            p99_s=percentile(self._refused_s, 0.99) if self._refused_s else float("inf"),
            others=self._others,
        )

    def _submit(self) -> None:
        slot, self._next = self._next, self._next + 1
        self._asked_ns[slot] = time.perf_counter_ns()
        self._pool.submit(SendJob(slot, self._request))

    def _on_end(self, slot: int, outcome: RequestOutcome, now_ns: int, connection: HttpConnection | str) -> None:
        asked_ns = self._asked_ns.pop(slot)
        status = 0 if isinstance(connection, str) else connection.head.status
        if status == 429:
            self._refused_s.append((now_ns - asked_ns) / 1e9)
        else:
            name = str(status) if status else outcome.name.lower()
            self._others[name] = self._others.get(name, 0) + 1
        asyncio.get_running_loop().call_soon(self._again)

    def _again(self) -> None:
        if not self._is_over:
            self._submit()
        elif not self._asked_ns:
            self._all_ended.set()


def _ask(plan: RefusalsPlan) -> Ask:
    return image_ask("image", prompt="penguin", seed=1, size="64x64", num_inference_steps=plan.steps)


def refusals_text(reports: Sequence[RefusalReport]) -> str:
    """Return the table of the reports."""
    lines = [f"{'connections':>11}{'429s/s':>10}{'p50 s':>9}{'p99 s':>9}  others"]
    lines += [
        f"{it.connections:>11}{it.refused / it.seconds:>10.1f}{it.p50_s:>9.3f}{it.p99_s:>9.3f}  {it.others}"
        for it in reports
    ]
    misses = [f"MISSED: {it.connections} connections: {miss}" for it in reports for miss in it.misses]
    return "\n".join([*lines, *misses])
