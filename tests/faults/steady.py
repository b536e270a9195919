"""Steady load for a long time: what the server holds is sampled, and a line is laid through the samples."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faults.asks import Ask, mixed
from faults.client import FaultClient, Reply
from faults.ends import End, Tally, verdict_of
from faults.load import Pace, draw, send_at_pace
from faults.run import Say, at_rest, quiet
from faults.server import RunningServer
from faults.slope import Slope, slope_of
from faults.usage import Usage, usage_of

__all__ = ["SAMPLED", "SteadyPlan", "SteadyReport", "capacity_per_s", "steady_run", "steady_text"]

SAMPLED = {
    "memory_bytes": "MiB",
    "shared_bytes": "MiB",
    "descriptors": "",
    "sockets": "",
    "socket_files": "",
    "shm_files": "",
    "threads": "",
    "processes": "",
}
"""What is sampled, and in which unit it is reported."""

_WARM_SHARE = 0.1
"""The share of the time at the beginning that does not count."""

_CLIENTS = 8
_WARM_ROUNDS = 12
_CAPACITY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyPlan:
    """`share`: of the capacity that is measured first. `every_s`: between two samples."""

    minutes: float = 30.0
    share: float = 0.7
    every_s: float = 5.0
    seed: int = 1
    hung_s: float = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyReport:
    """The ends of the load, and the slope of everything that was sampled, by name."""

    capacity_per_s: float
    offered_per_s: float
    minutes: float
    ends: Tally
    slopes: Mapping[str, Slope]

    @property
    def problems(self) -> list[str]:
        """What grew, and requests that ended as none may."""
        found = [f"{name} grows by {slope.per_hour:.3g} per hour" for name, slope in self.slopes.items() if slope.grows]
        if self.ends.failed or not self.ends.ends[End.RIGHT]:
            found.append(f"ends: {self.ends.to_json()}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        slopes = {
            name: {
                "per_hour": slope.per_hour, "low": slope.low, "high": slope.high, "start": slope.start,
                "rise": slope.rise, "noise": slope.noise, "grows": slope.grows, "unit": SAMPLED[name],
            }
            for name, slope in self.slopes.items()
        }  # fmt: skip
        return {
            "capacity_per_s": self.capacity_per_s, "offered_per_s": self.offered_per_s, "minutes": self.minutes,
            "ends": self.ends.to_json(), "slopes": slopes, "problems": self.problems,
        }  # fmt: skip


async def steady_run(server: RunningServer, plan: SteadyPlan, say: Say) -> SteadyReport:
    """Measure the capacity, offer a share of it for a while, and sample. Raises `RunFailed`."""
    async with FaultClient(server.url, hung_s=plan.hung_s) as client:
        example = (await client.get("/v2/models/picks/example")).json()
        asks = mixed(plan.seed, example)
        expected = await quiet(client, asks, say)
        await at_rest(server, client, asks, rounds=_WARM_ROUNDS, say=say)
        capacity = await capacity_per_s(client, asks, seconds=_CAPACITY_S, clients=_CLIENTS, seed=plan.seed)
        offered = plan.share * capacity
        say(f"capacity {capacity:.2f} requests/s; {offered:.2f} are offered for {plan.minutes:g} minutes")
        ends = Tally()
        samples: list[tuple[float, Usage]] = []
        until_s = time.monotonic() + 60.0 * plan.minutes
        sampling = asyncio.create_task(_sample(server, plan.every_s, samples, say))

        def on_reply(ask: Ask, reply: Reply) -> None:
            ends.add(verdict_of(ask, reply, expected[ask.key], in_our_stead=False))

        try:
            pace = Pace(per_s=offered, seed=plan.seed)
            await send_at_pace(client, asks, pace, on_reply, until=lambda: time.monotonic() > until_s)
        finally:
            sampling.cancel()
    counted = samples[int(_WARM_SHARE * len(samples)) :]
    return SteadyReport(
        capacity_per_s=capacity,
        offered_per_s=offered,
        minutes=plan.minutes,
        ends=ends,
        slopes={name: _slope(name, counted) for name in SAMPLED},
    )


async def capacity_per_s(client: FaultClient, asks: Sequence[Ask], *, seconds: float, clients: int, seed: int) -> float:
    """Measure how many requests of this mix are answered per second where `clients` ask without a pause."""
    answered = 0
    began_s = time.monotonic()

    def on_reply(_: Ask, reply: Reply) -> None:
        nonlocal answered
        answered += reply.status == 200

    async def one(number: int) -> None:
        await _closed(client, asks, on_reply, until_s=began_s + seconds, seed=seed + number)

    await asyncio.gather(*(one(number) for number in range(clients)))
    return answered / (time.monotonic() - began_s)


async def _closed(
    client: FaultClient, asks: Sequence[Ask], on_reply: Callable[[Ask, Reply], None], *, until_s: float, seed: int
) -> None:
    chosen = draw(asks, random.Random(seed))
    while time.monotonic() < until_s:
        ask = next(chosen)
        on_reply(ask, await client.send(ask))


async def _sample(server: RunningServer, every_s: float, samples: list[tuple[float, Usage]], say: Say) -> None:
    told_s = 0.0
    while True:
        usage = await asyncio.to_thread(usage_of, server)
        now_s = time.monotonic()
        samples.append((now_s, usage))
        if now_s - told_s > 60.0:
            told_s = now_s
            kinds = ", ".join(f"{kind} {held / 2**20:.0f}" for kind, held in usage.memory_by_kind.items())
            said = f"{usage.memory_bytes / 2**20:.0f} MiB ({kinds})"
            say(f"{said}, {usage.descriptors} descriptors, {usage.threads} threads")
        await asyncio.sleep(every_s)


def _slope(name: str, samples: Sequence[tuple[float, Usage]]) -> Slope:
    per_unit = 2**20 if SAMPLED[name] == "MiB" else 1
    return slope_of([at for at, _ in samples], [getattr(usage, name) / per_unit for _, usage in samples])


def steady_text(report: SteadyReport) -> str:
    """Return the table of a report."""
    lines = [
        f"{report.ends.total} requests in {report.minutes:g} minutes at {report.offered_per_s:.2f}/s of "
        f"{report.capacity_per_s:.2f}/s: {report.ends.ends[End.RIGHT]} right",
        *(f"{count:>6}  {what}" for what, count in report.ends.seen.most_common()),
        f"{'':<16}{'start':>12}{'per hour':>12}{'low':>10}{'high':>10}{'rise':>10}{'noise':>10}",
    ]
    for name, slope in report.slopes.items():
        values = (slope.per_hour, slope.low, slope.high, slope.rise, slope.noise)
        text = f"{slope.start:>12.5g}{values[0]:>12.3g}" + "".join(f"{value:>10.3g}" for value in values[1:])
        lines.append(f"{name.removesuffix('_bytes'):<16}{text}{'  GROWS' if slope.grows else ''}")
    return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in report.problems)])
