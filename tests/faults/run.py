"""The fault run: a quiet round that records every answer, then the same requests while processes die, then quiet again.

Every answer of the second part is compared with the first's; what the server holds, before with after.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx2

from faults.asks import Answer, Ask, answer_of, mixed
from faults.client import FaultClient, Reply
from faults.ends import End, Tally, Verdict, tally, verdict_of
from faults.load import Pace, send_all, send_at_pace
from faults.server import NEVER_KILLED, OTHERS, RunningServer
from faults.striking import Fault, FaultLog, Striker, probes_for
from faults.usage import Usage, grown, settled
from plait_bench.images.ours import prepared_parts

__all__ = ["FaultPlan", "FaultReport", "RunFailed", "at_rest", "fault_run", "prepared", "quiet"]

Say: TypeAlias = Callable[[str], None]

_IN_OUR_STEAD = frozenset({"ingress", "proxy"})
_AT_ONCE = 16
_PREPARED_S = 90.0
_ROUND, _ROUND_AT_ONCE = 4, 48
_STILL_SHARE, _STILL_ROUNDS = 0.01, 2
_GAP_S = (1.0, 3.0)
_PAUSE_S = (2.0, 6.0)
_LONG_PAUSE_S = 60.0
"""Of what is never killed."""


class RunFailed(Exception):
    """The run cannot be judged: the server was not well before the first fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """What a run does. `kinds`: whose processes die, all that there are if empty; each dies at least once, and again
    in turn until `seconds` are over. `hung_s` and `recovery_s`: how long a request and a recovery may take.
    `warm_rounds`: of load before the first fault, at most (`at_rest`)."""

    requests: int = 500
    seconds: float = 60.0
    seed: int = 1
    kinds: tuple[str, ...] = ()
    pauses: bool = False
    disconnects: float = 0.05
    hung_s: float = 180.0
    recovery_s: float = 180.0
    warm_rounds: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultReport:
    """What came of a run. `ends`: of the load, by the fault that came last before a request's end ("none": before
    the first one); `probes`: of the requests that looked for a recovery; `after`: of the quiet round at the end."""

    plan: FaultPlan
    seconds: float
    ends: Mapping[str, Tally]
    probes: Tally
    after: Tally
    faults: Sequence[Fault]
    held_before: Usage
    held_after: Usage
    left: list[str] = field(default_factory=list)

    @property
    def all_ends(self) -> Tally:
        """The ends of the whole load."""
        whole = Tally()
        for part in self.ends.values():
            whole.ends += part.ends
            whole.seen += part.seen
        return whole

    @property
    def grown(self) -> dict[str, tuple[int, int]]:
        """What the server held more of afterwards."""
        return grown(self.held_before, self.held_after)

    @property
    def problems(self) -> list[str]:
        """Everything that should not have been, in words; none if the run was passed."""
        whole = self.all_ends
        found = [f"{what} ({count}x)" for what, count in self._failures().items()]
        found += [f"{fault.name} did not recover" for fault in self.faults if not fault.has_recovered]
        found += [f"{name} grew from {was} to {now}{self._by_kind(name)}" for name, (was, now) in self.grown.items()]
        found += [f"left behind: {what}" for what in self.left]
        if not whole.ends[End.RIGHT]:
            found.append("no answer was right")
        if not self.faults:
            found.append("no process was killed")
        if self.after.ends[End.RIGHT] != self.after.total:
            found.append(f"after the faults only {self.after.ends[End.RIGHT]} of {self.after.total} answers were right")
        return found

    def _failures(self) -> dict[str, int]:
        bad = tuple(f"{end}:" for end in (End.WRONG, End.UNDOCUMENTED, End.HUNG))
        counts: dict[str, int] = defaultdict(int)
        for part in (self.all_ends, self.probes, self.after):
            for what, count in part.seen.items():
                if what.startswith(bad):
                    counts[what] += count
        return counts

    def _by_kind(self, name: str) -> str:
        """Return whose memory grew, the most first."""
        if name != "memory_bytes":
            return ""
        before, after = self.held_before.memory_by_kind, self.held_after.memory_by_kind
        more = {kind: now - before.get(kind, 0) for kind, now in after.items()}
        return "".join(f", {kind} by {more[kind]}" for kind in sorted(more, key=lambda it: -more[it]) if more[kind] > 0)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "seed": self.plan.seed,
            "seconds": round(self.seconds, 1),
            "all": self.all_ends.to_json(),
            "right_share": round(self.all_ends.right_share, 4),
            "by_fault": {name: part.to_json() for name, part in self.ends.items()},
            "probes": self.probes.to_json(),
            "after": self.after.to_json(),
            "faults": [
                {"kind": it.kind, "action": it.action, "answered_s": it.answered_s, "replaced_s": it.replaced_s,
                 "recovered": it.has_recovered}
                for it in self.faults
            ],
            "held": {"before": self.held_before.to_json(), "after": self.held_after.to_json(), "grown": self.grown},
            "left": list(self.left),
            "problems": self.problems,
        }  # fmt: skip


async def fault_run(server: RunningServer, plan: FaultPlan, say: Say) -> FaultReport:
    """Do the whole run against a server. Raises `RunFailed`."""
    async with FaultClient(server.url, hung_s=plan.hung_s) as client:
        asks = mixed(plan.seed, await _example(client))
        expected = await quiet(client, asks, say)
        before = await at_rest(server, client, asks, rounds=plan.warm_rounds, say=say)
        log = FaultLog()
        faulting = _Faulting(server, client, asks, expected, plan, log, say)
        began_s = time.monotonic()
        verdicts = await faulting.go()
        seconds = time.monotonic() - began_s
        say("quiet again")
        after = [*await send_all(client, asks, at_once=1), *await send_all(client, asks, at_once=_AT_ONCE)]
        await prepared(client)
        held_after = (await at_rest(server, client, asks, rounds=before.rounds, say=say, all_rounds=True)).held
    return FaultReport(
        plan=plan,
        seconds=seconds,
        ends=verdicts,
        probes=faulting.probes,
        after=tally(_judge(ask, reply, expected, log) for ask, reply in after),
        faults=tuple(log.faults),
        held_before=before.held,
        held_after=held_after,
        left=server.left,  # filled when the server is stopped
    )


async def quiet(client: FaultClient, asks: Sequence[Ask], say: Say) -> dict[str, Answer]:
    """Send every request alone, then all together; return the answers. Raises `RunFailed` if one has no answer, or
    another one in company than alone."""
    await send_all(client, asks, at_once=_AT_ONCE)  # what the first requests cause is not part of the server's rest
    await prepared(client)
    expected: dict[str, Answer] = {}
    for ask, reply in await send_all(client, asks, at_once=1):
        verdict = verdict_of(ask, reply, None, in_our_stead=False)
        if verdict.end is not End.RIGHT:
            raise RunFailed(f"{ask.key} has no answer on a quiet server: {verdict.end} {verdict.what}")
        expected[ask.key] = answer_of(ask, reply.body)
    for ask, reply in await send_all(client, asks, at_once=_AT_ONCE):
        verdict = verdict_of(ask, reply, expected[ask.key], in_our_stead=False)
        if verdict.end is not End.RIGHT:
            raise RunFailed(f"the quiet server disagrees with itself: {verdict.end} {verdict.what}")
    say(f"{len(asks)} requests have answers, alone and in company")
    return expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a server holds after so many rounds of load."""

    held: Usage
    rounds: int


async def at_rest(
    server: RunningServer, client: FaultClient, asks: Sequence[Ask], *, rounds: int, say: Say, all_rounds: bool = False
) -> Rest:
    """Return what the server holds when a round of load adds no memory any more, at the latest after `rounds`.

    An engine and its ControlNets compile programs for shapes that recur, up to a bound: batches of other sizes and LoRA
    sets add to what they hold for a while. So what fresh processes hold is compared after as many rounds as the old
    ones had (`all_rounds`: none is left out), not after fewer.
    """
    rng = random.Random(0)
    held = await settled(server)
    still = number = 0
    while number < rounds and (all_rounds or still < _STILL_ROUNDS):
        number += 1
        many = [ask for ask in asks for _ in range(_ROUND)]
        rng.shuffle(many)
        await send_all(client, many, at_once=_ROUND_AT_ONCE)
        before, held = held, await settled(server)
        say(f"round {number}: {held.memory_bytes / 2**20:,.0f} MiB")
        still = still + 1 if held.memory_bytes < (1 + _STILL_SHARE) * before.memory_bytes else 0
    return Rest(held=held, rounds=number)


class _Faulting:
    """The middle of the run: a load, and the faults beside it."""

    def __init__(
        self,
        server: RunningServer,
        client: FaultClient,
        asks: Sequence[Ask],
        expected: Mapping[str, Answer],
        plan: FaultPlan,
        log: FaultLog,
        say: Say,
    ) -> None:
        self._server, self._client, self._asks, self._expected = server, client, asks, expected
        self._plan, self._log, self._say = plan, log, say
        self._rng = random.Random(plan.seed)
        self.probes = Tally()

    async def go(self) -> dict[str, Tally]:
        """Return the verdicts on the load by the name of the fault that came last before."""
        replies: list[tuple[Ask, Reply]] = []
        striking = asyncio.create_task(self._strike())
        pace = Pace(
            per_s=self._plan.requests / self._plan.seconds, disconnects=self._plan.disconnects, seed=self._plan.seed
        )
        try:
            await send_at_pace(
                self._client, self._asks, pace, lambda ask, reply: replies.append((ask, reply)), until=striking.done
            )
        finally:
            striking.cancel()
        await striking
        by_fault: dict[str, Tally] = {"none": Tally()}
        for ask, reply in sorted(replies, key=lambda pair: pair[1].ended_s):
            fault = self._log.at(reply.ended_s)
            name = "none" if fault is None else fault.name
            by_fault.setdefault(name, Tally()).add(_judge(ask, reply, self._expected, self._log))
        return by_fault

    async def _strike(self) -> None:
        """Kill one process after the other: every kind at least once, and in turn until the time is over."""
        until_s = time.monotonic() + self._plan.seconds
        there = await asyncio.to_thread(self._server.kinds)
        kinds = [kind for kind in self._plan.kinds or sorted(there) if kind not in OTHERS and there[kind]]
        if missing := set(self._plan.kinds) - set(kinds):
            raise RunFailed(f"there is no process of kind {', '.join(sorted(missing))}; there are {sorted(there)}")
        probes = probes_for(kinds, list(self._asks))
        striker = Striker(self._server, self._log, probes, self._probe, recovery_s=self._plan.recovery_s)
        self._rng.shuffle(kinds)
        turns = 0
        while turns < len(kinds) or time.monotonic() < until_s:
            await asyncio.sleep(self._rng.uniform(*_GAP_S))
            kind = kinds[turns % len(kinds)]
            pause_s = self._rng.uniform(*_PAUSE_S) if self._plan.pauses and turns >= len(kinds) else None
            fault = await striker.strike(kind, pause_s=_LONG_PAUSE_S if kind in NEVER_KILLED else pause_s)
            turns += 1
            if fault is not None:
                self._say(_described(fault))
                if not fault.has_recovered:
                    return  # what dies next could not be told from what is dead already
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def _probe(self, ask: Ask) -> Verdict:
        reply = await self._client.send(ask)
        verdict = _judge(ask, reply, self._expected, self._log)
        self.probes.add(verdict)
        return verdict


def _judge(ask: Ask, reply: Reply, expected: Mapping[str, Answer], log: FaultLog) -> Verdict:
    in_our_stead = log.covers(_IN_OUR_STEAD, reply.began_s, reply.ended_s)
    return verdict_of(ask, reply, expected[ask.key], in_our_stead=in_our_stead)


def _described(fault: Fault) -> str:
    if not fault.has_recovered:
        return f"{fault.name}: NOT RECOVERED"
    answered = "never" if fault.answered_s is None else f"{fault.answered_s:.1f} s"
    replaced = "never" if fault.replaced_s is None else f"{fault.replaced_s:.1f} s"
    return f"{fault.name}: first right answer after {answered}, process there after {replaced}"


async def _example(client: FaultClient) -> Mapping[str, Any]:
    """Return the example request of the starter's ranking model."""
    response = await client.get("/v2/models/picks/example")
    if response.status_code != 200:
        raise RunFailed(f"the server does not rank with the starter model: {response.status_code} {response.text}")
    example: Mapping[str, Any] = response.json()
    return example


async def prepared(client: FaultClient) -> None:
    """Wait until the engine runs on what it converts behind its first requests, or the patience for that is over."""
    until_s = time.monotonic() + _PREPARED_S
    while time.monotonic() < until_s:
        try:
            parts = prepared_parts((await client.get("/metrics")).text)
        except httpx2.TransportError as error:
            raise RunFailed(f"no metrics: {error}") from error
        if parts is None or parts >= {"unet", "vae"}:
            return
        await asyncio.sleep(0.5)
