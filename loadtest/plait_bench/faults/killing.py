"""A mixed load on a server whose processes die one after the other, and one that nothing disturbs for hours.

`ends`: a quiet round records every answer, then the same requests come at a random pace while each kind of process is
killed in turn, the next one only after recovery; then it is quiet again. Every answer is compared with the first
round's; what the server holds, before with after (`held`). `night` does the same to a Ray on which Serve was given a
configuration, as an operator deploys it: Serve's control store is stopped for a minute, a second version takes over in
place while requests run, and each kind of process is also stopped for a while. `steady` lays a line through what the
server holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any, NamedTuple, TypeAlias

import httpx2
import numpy as np
import yaml
from scipy import stats

from plait_bench.benchmark import Reading, ResultRow, readings
from plait_bench.commands import PLAIT, run_command
from plait_bench.errors import SystemFailed
from plait_bench.faults.requests import WEIGHTS, Answer, Ask, End, Reply, Tally, Verdict, answer_of, mixed, verdict_of
from plait_bench.faults.server import (
    HELD,
    OTHERS,
    Client,
    FaultServer,
    OnServer,
    Usage,
    cancelled,
    deployed,
    grown,
    send_all,
    settled,
    watched,
)

_MAX_OPEN, _AT_ONCE, _CLIENTS = 256, 16, 8
_ROUND, _ROUND_AT_ONCE = 4, 48
_GAP_S, _PAUSE_S, _GCS_S = (1.0, 3.0), (2.0, 6.0), 60.0
_DISCONNECTS, _RECOVERY_S = 0.05, 180.0
_REQUESTS, _LOAD_S, _WARM_ROUNDS, _STEADY_S = 500, 60.0, 12, 1800.0
UPDATE = "update"
_POLL_S, _SURE = 0.25, 3
"""How many right answers in a row make a recovery."""

Turn: TypeAlias = tuple[str, float | None]
"""The kind whose process is next, and for how long it is stopped; None: it is killed."""


async def send_at_pace(
    client: Client,
    asks: Sequence[Ask],
    per_s: float,
    on_reply: Callable[[Ask, Reply], object],
    *,
    until: Callable[[], bool],
    disconnects: float = 0.0,
) -> None:
    """Send requests until `until` returns true, then wait until all have ended; the clients of a share of them
    disconnect within a second. Times and requests are drawn, and do not depend on what the server does."""
    rng, room, next_s = random.Random(1), asyncio.Semaphore(_MAX_OPEN), time.monotonic()
    weights = [WEIGHTS[ask.form] for ask in asks]

    async def one(ask: Ask, leave_after_s: float | None) -> None:
        try:
            on_reply(ask, await client.send(ask, leave_after_s=leave_after_s))
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        while not until():
            (ask,) = rng.choices(asks, weights)
            next_s += rng.expovariate(per_s)
            leaves, after_s = rng.random() < disconnects, rng.uniform(0.0, 1.0)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            await room.acquire()
            tasks.create_task(one(ask, after_s if leaves else None))


async def quiet(client: Client, asks: Sequence[Ask]) -> dict[str, Answer]:
    """Send every request alone, then all together; return the answers. Raises `SystemFailed` if one has no answer, or
    another one in company than alone."""
    await send_all(client, asks, at_once=_AT_ONCE)  # what the first requests cause is not part of the server's rest
    await client.prepared()
    replies = await client.images(asks, at_once=1)
    expected = {ask.key: answer_of(ask, reply.body) for ask, reply in zip(asks, replies, strict=True)}
    for ask, reply in await send_all(client, asks, at_once=_AT_ONCE):
        if (verdict := verdict_of(ask, reply, expected[ask.key])).end is not End.RIGHT:
            raise SystemFailed(f"the quiet server disagrees with itself: {verdict.end} {verdict.what}")
    return expected


@dataclass(kw_only=True)
class Fault:
    """A fault. Seconds from `at_s` (of a pause: from its end) until the first right answer that needs the process, and
    until there are as many processes of its kind as before; None: not yet, or never."""

    kind: str
    name: str
    at_s: float
    answered_s: float | None = None
    replaced_s: float | None = None
    over_s: float | None = None

    def covers(self, reply: Reply) -> bool:
        """Return whether it was there at any time of a request, and left the proxy, or nobody, to answer."""
        is_over = self.over_s is not None and self.over_s < reply.began_s
        return self.kind == "proxy" and self.at_s <= reply.ended_s and not is_over


class Mixed(OnServer):
    """A mixed load on the starter models, and what its answers are to be."""

    systems = ("plait",)
    most_rounds = 1

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.probes = Tally()
        self.faults: list[Fault] = []

    def judged(self, ask: Ask, reply: Reply) -> Verdict:
        """Judge the end of a request."""
        in_our_stead = any(fault.covers(reply) for fault in self.faults)
        return verdict_of(ask, reply, self.expected[ask.key], in_our_stead=in_our_stead)

    async def begin(self) -> None:
        """Record every answer, and warm up."""
        async with Client(self.server.url) as client:
            self.asks = mixed(1, (await client.get("/v2/models/picks/example")).json())
            self.expected = await quiet(client, self.asks)
            self.say(f"{len(self.asks)} requests have answers, alone and in company")
            self.before = await self.at_rest(client)

    async def at_rest(self, client: Client) -> Usage:
        """Return what the server holds after some rounds of load, in which an engine and its ControlNets compile
        programs for shapes that recur, up to a bound."""
        rng = random.Random(0)
        for _ in range(_WARM_ROUNDS):
            many = self.asks * _ROUND
            rng.shuffle(many)
            await send_all(client, many, at_once=_ROUND_AT_ONCE)
        return await settled(self.server)


class Ends(Mixed):
    """Each kind of process is killed once, and again in turn for a minute of five hundred requests; the pace goes on
    until the end."""

    metrics: Mapping[str, str] = {**dict.fromkeys(("requests", *End), "requests"), "answered_s": "s"}
    untimed = metrics.keys() - {"answered_s"}

    def turns(self, kinds: Sequence[str], rng: random.Random) -> tuple[list[Turn], list[Turn]]:
        """Return what is done once, however long it takes, and what is done in turn while there is time."""
        kills: list[Turn] = [(kind, None) for kind in kinds if kind != "gcs"]  # with which Ray ends
        return kills, kills

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Do the whole run."""
        replies: list[tuple[Ask, Reply]] = []
        async with Client(self.server.url) as client:
            striking = asyncio.create_task(self._strike(client))
            async with cancelled([striking]):
                await send_at_pace(
                    client, self.asks, _REQUESTS / _LOAD_S, lambda ask, reply: replies.append((ask, reply)),
                    until=striking.done, disconnects=_DISCONNECTS,
                )  # fmt: skip
                await striking
            self.say("quiet again")
            after = [pair for at_once in (1, _AT_ONCE) for pair in await send_all(client, self.asks, at_once=at_once)]
            await client.prepared()
            held = await self.at_rest(client)
        ends, all_ends, afterwards = {"none": Tally()}, Tally(), Tally()
        for ask, reply in sorted(replies, key=lambda pair: pair[1].ended_s):
            last = next((fault.name for fault in reversed(self.faults) if fault.at_s <= reply.ended_s), "none")
            ends.setdefault(last, Tally()).add(all_ends.add(self.judged(ask, reply)))
        for ask, reply in after:
            afterwards.add(self.judged(ask, reply))
        for what, count in all_ends.seen.most_common():
            self.say(f"{count:>6}  {what}")
        self.missed += [*self.probes.failures, *problems(all_ends, afterwards, self.faults)]
        self.missed += grown(self.before, held)
        return list(self._ended({**ends, "all": all_ends}))

    def _ended(self, ends: Mapping[str, Tally]) -> Iterator[Reading]:
        """Yield the ends by the fault before them, and how long recoveries took."""
        for name, part in ends.items():
            yield from readings({"requests": part.total, **{end.value: part.ends[end] for end in End}}, system=name)
        for fault in self.faults:
            if fault.answered_s is not None:
                yield from readings({"answered_s": fault.answered_s}, system=fault.name)

    async def _strike(self, client: Client) -> None:
        """Do one thing after the other, the next only when all is as before."""
        rng, until_s = random.Random(1), time.monotonic() + _LOAD_S
        kinds = sorted(set((await asyncio.to_thread(self.server.processes)).values()) - OTHERS)
        rng.shuffle(kinds)
        once, again = self.turns(kinds, rng)
        for number, (kind, pause_s) in enumerate(chain(once, cycle(again))):
            if number >= len(once) and time.monotonic() >= until_s:
                break
            await asyncio.sleep(rng.uniform(*_GAP_S))
            fault = Fault(kind=kind, name=kind if pause_s is None else f"{kind}, paused", at_s=time.monotonic())
            self.faults.append(fault)
            is_back = await self.begun(kind, pause_s)
            await self._recovered(client, fault, is_back)
            self.say(f"{fault.name}: right after {fault.answered_s} s, there after {fault.replaced_s} s")
            if fault.over_s is None:
                return  # what dies next could not be told from what is dead already
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def begun(self, kind: str, pause_s: float | None) -> Callable[[], bool]:
        """Kill a process of this kind, or stop it for `pause_s`; return whether there are as many as before."""
        there = await asyncio.to_thread(self.server.of, kind)
        if pause_s is None:
            os.kill(there[0], signal.SIGKILL)
            return lambda: len(set(self.server.of(kind)) - {there[0]}) >= len(there)
        os.kill(there[0], signal.SIGSTOP)
        try:
            await asyncio.sleep(pause_s)
        finally:
            os.kill(there[0], signal.SIGCONT)
        return lambda: len(self.server.of(kind)) >= len(there)

    async def _recovered(self, client: Client, fault: Fault, is_back: Callable[[], bool]) -> None:
        """Ask until several answers in a row were right, all being back, or the time for that is over."""
        struck_s, right = time.monotonic(), 0

        async def watch() -> None:
            while not await asyncio.to_thread(is_back):
                await asyncio.sleep(_POLL_S)
            fault.replaced_s = round(time.monotonic() - struck_s, 3)

        probe = next((ask for ask in self.asks if fault.kind in ask.needs), self.asks[0])  # the cheap ones come first
        async with cancelled([asyncio.create_task(watch())]):
            while right < _SURE and time.monotonic() < struck_s + _RECOVERY_S:
                verdict = self.judged(probe, await client.send(probe))
                right = right + (fault.replaced_s is not None) if verdict.end is End.RIGHT else 0
                if verdict.end is End.RIGHT and fault.answered_s is None:
                    fault.answered_s = round(time.monotonic() - struck_s, 3)
                self.probes.add(verdict)
                await asyncio.sleep(_POLL_S)
        if right >= _SURE:
            fault.over_s = time.monotonic()


def problems(ends: Tally, after: Tally, faults: Sequence[Fault]) -> list[str]:
    """Return what should not have been, in words: of the load, of the quiet round after it, and of the recoveries."""
    found = [*ends.failures, *after.failures]
    found += [f"{fault.name} did not recover" for fault in faults if fault.over_s is None]
    found += [] if faults else ["no process was killed"]
    found += [] if ends.ends[End.RIGHT] else ["no answer was right"]
    if (right := after.ends[End.RIGHT]) != after.total:
        found.append(f"after the faults only {right} of {after.total} answers were right")
    return found


class Night(Ends):
    """The same on a Ray of an operator's; with an update, and with stopped processes."""

    def turns(self, kinds: Sequence[str], rng: random.Random) -> tuple[list[Turn], list[Turn]]:
        """Return what is done once; nothing is done again."""
        kills, _ = super().turns(kinds, rng)
        paused: list[Turn] = [(kind, rng.uniform(*_PAUSE_S)) for kind, _ in kills]
        return [("gcs", _GCS_S), *kills, (UPDATE, None), *paused], []

    @contextmanager
    def started(self, config: Mapping[str, Any]) -> Iterator[FaultServer]:
        """Start Ray and Serve, and hand them the first version. Raises `SystemFailed`."""
        with (
            httpx2.Client(timeout=_RECOVERY_S, trust_env=False) as self._http,
            deployed(self.folder, self.missed) as (server, self._deploy),
        ):
            self.server = server
            is_there = self._updated(40)
            while not is_there():
                time.sleep(_POLL_S)
            yield server

    async def begun(self, kind: str, pause_s: float | None) -> Callable[[], bool]:
        """Begin an update, or a fault."""
        if kind != UPDATE:
            return await super().begun(kind, pause_s)
        return await asyncio.to_thread(self._updated, 41)

    def _updated(self, max_steps: int) -> Callable[[], bool]:
        """Hand over a version; return whether it, and no other, answers."""
        file = self.folder / "plait.yaml"
        file.write_text(json.dumps({"images": {"limits": {"max_steps": max_steps}}}))  # JSON is YAML
        rendered = run_command([*PLAIT, "deploy", "render", "--target", "serve", str(file)], limit_s=_RECOVERY_S)
        is_running = self._deploy(yaml.safe_load(rendered)["applications"][0])

        def is_there() -> bool:
            try:
                models = self._http.get(f"{self.server.url}/v1/models").json()["data"]
            except (httpx2.TransportError, ValueError, KeyError):
                return False
            return is_running() and any(model.get("limits", {}).get("max_steps") == max_steps for model in models)

        return is_there


# ---- what grows -----------------------------------------------------------------------------------------------------

SAMPLED = HELD[:-2]
_WARM_SHARE, _EVERY_S, _CAPACITY_S, _SHARE = 0.1, 5.0, 30.0, 0.7
_BLOCKS, _NOISES = 30, 2.0
"""Samples are taken together to so many medians: neighbours are alike, and an interval would be too narrow."""


class Slope(NamedTuple):
    """A line's rise per hour with its 95 % interval. `grows`: whether it rises for sure, and by more than twice the
    noise of the samples around it."""

    per_hour: float
    low: float
    high: float
    grows: bool


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line by Theil and Sen: the median of all pairs' slopes. Raises ValueError for fewer than three samples."""
    if len(times_s) < 3 or len(times_s) != len(values):
        raise ValueError(f"{len(values)} values at {len(times_s)} moments are no line")
    parts = min(_BLOCKS, len(times_s))
    hours = np.array([np.median(part) for part in np.array_split(np.asarray(times_s, dtype=float) / 3600.0, parts)])
    taken = np.array([np.median(part) for part in np.array_split(np.asarray(values, dtype=float), parts)])
    fit = stats.theilslopes(taken, hours, alpha=0.95)
    around = taken - (fit.intercept + fit.slope * hours)
    noise = stats.median_abs_deviation(around, scale="normal")
    grows = fit.low_slope > 0.0 and fit.slope * (hours[-1] - hours[0]) > _NOISES * noise
    return Slope(float(fit.slope), float(fit.low_slope), float(fit.high_slope), bool(grows))


class Steady(Mixed):
    """A share of what the server can do is asked of it for half an hour."""

    metrics: Mapping[str, str] = {
        f"{name}_per_hour": "MiB" if name.endswith("_bytes") else "1" for name in SAMPLED
    }  # fmt: skip
    untimed = metrics

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.slopes: dict[str, Slope] = {}

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Offer the load, and sample; the first tenth of the samples does not count."""
        ends = Tally()
        per_s = _SHARE * self.capacity_per_s(self.asks, seconds=_CAPACITY_S, clients=_CLIENTS)
        self.say(f"{per_s:.2f} requests/s are offered for {_STEADY_S / 60:g} minutes")
        async with Client(self.server.url) as client:
            until_s = time.monotonic() + _STEADY_S
            async with watched(self.server.usage, every_s=_EVERY_S) as samples:
                await send_at_pace(
                    client, self.asks, per_s, lambda ask, reply: ends.add(self.judged(ask, reply)),
                    until=lambda: time.monotonic() > until_s,
                )  # fmt: skip
        counted = samples[int(_WARM_SHARE * len(samples)) :]
        for name in SAMPLED:
            values = [usage[name] / (2**20 if name.endswith("_bytes") else 1) for _, usage in counted]
            self.slopes[name] = slope_of([at_s for at_s, _ in counted], values)
        self.missed += ends.failures if ends.ends[End.RIGHT] else ["no answer was right"]
        self.missed += [f"{name} grows by {it.per_hour:.3g} per hour" for name, it in self.slopes.items() if it.grows]
        return []

    def conclude(self) -> Sequence[ResultRow]:
        """Return the slopes; the spread of a row is the slope's 95 % interval."""
        return [
            replace(self.row("plait", f"{name}_per_hour", it.per_hour), p20=it.low, p80=it.high)
            for name, it in self.slopes.items()
        ]
