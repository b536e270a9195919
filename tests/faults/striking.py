"""Faults, one after the other: a process is killed (or stopped for a while), and the next one only after recovery."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from faults.asks import Ask
from faults.ends import End, Verdict
from faults.server import RunningServer, send
from plait.server.processes import ProcessId

__all__ = ["Fault", "FaultLog", "Striker", "probes_for"]

_POLL_S = 0.25
_SURE = 3
"""How many right answers in a row make a recovery."""

Action = Literal["kill", "pause"]


@dataclass(slots=True, kw_only=True)
class Fault:
    """A fault. Seconds from `at_s` (of a pause: from its end) until the first right answer that needs the process, and
    until there are as many processes of its kind as before; None: not yet, or never."""

    kind: str
    action: Action
    at_s: float
    answered_s: float | None = None
    replaced_s: float | None = None
    over_s: float | None = None

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.kind if self.action == "kill" else f"{self.kind}, paused"

    @property
    def has_recovered(self) -> bool:
        """Whether everything was as before."""
        return self.over_s is not None


@dataclass(slots=True)
class FaultLog:
    """The faults so far, oldest first."""

    faults: list[Fault] = field(default_factory=list)

    def at(self, moment_s: float) -> Fault | None:
        """Return the last fault before a moment."""
        return next((fault for fault in reversed(self.faults) if fault.at_s <= moment_s), None)

    def covers(self, kinds: frozenset[str], began_s: float, ended_s: float) -> bool:
        """Return whether a fault of one of the kinds was there at any time between two moments."""
        return any(
            fault.kind in kinds and fault.at_s <= ended_s and (fault.over_s is None or fault.over_s >= began_s)
            for fault in self.faults
        )


def probes_for(kinds: list[str], asks: list[Ask]) -> dict[str, Ask]:
    """Return a request for each kind that needs it: the first, for they are in the order of their costs. A kind that
    none needs (Serve's controller) gets the first of all."""
    return {kind: next((ask for ask in asks if kind in ask.needs), asks[0]) for kind in kinds}


class Striker:
    """Kills processes of a server and waits until it is well again. `ask` sends a probe and judges it."""

    def __init__(
        self,
        server: RunningServer,
        log: FaultLog,
        probes: Mapping[str, Ask],
        ask: Callable[[Ask], Awaitable[Verdict]],
        *,
        recovery_s: float,
    ) -> None:
        self._server = server
        self._log = log
        self._probes = probes
        self._ask = ask
        self._recovery_s = recovery_s

    async def strike(self, kind: str, *, pause_s: float | None = None) -> Fault | None:
        """Kill a process of this kind, or stop it for `pause_s`; return once the server has recovered, or the time for
        that is over. None: there was none."""
        there = await asyncio.to_thread(self._server.of, kind)
        if not there:
            return None
        victim = there[0]
        fault = Fault(kind=kind, action="kill" if pause_s is None else "pause", at_s=time.monotonic())
        self._log.faults.append(fault)
        if pause_s is None:
            send(victim, signal.SIGKILL)
        else:
            send(victim, signal.SIGSTOP)
            try:
                await asyncio.sleep(pause_s)
            finally:
                send(victim, signal.SIGCONT)
        struck_s = time.monotonic()
        dead = None if pause_s is not None else victim
        replacing = asyncio.create_task(self._replaced(fault, dead, len(there), struck_s))
        try:
            await self._recovered(fault, struck_s)
        finally:
            replacing.cancel()
        return fault

    async def _replaced(self, fault: Fault, dead: ProcessId | None, count: int, struck_s: float) -> None:
        while True:
            there = await asyncio.to_thread(self._server.of, fault.kind)
            if sum(process != dead for process in there) >= count:
                fault.replaced_s = time.monotonic() - struck_s
                return
            await asyncio.sleep(_POLL_S)

    async def _recovered(self, fault: Fault, struck_s: float) -> None:
        """Ask until several answers in a row were right, the process being there again."""
        until_s = struck_s + self._recovery_s
        right = 0
        while right < _SURE and time.monotonic() < until_s:
            verdict = await self._ask(self._probes[fault.kind])
            if verdict.end is not End.RIGHT:
                right = 0
            else:
                if fault.answered_s is None:
                    fault.answered_s = time.monotonic() - struck_s
                right += fault.replaced_s is not None
            await asyncio.sleep(_POLL_S)
        if right >= _SURE:
            fault.over_s = time.monotonic()
