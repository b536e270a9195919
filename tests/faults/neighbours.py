"""A well-behaved tenant beside one that attacks: are all of its images right, how much later do they come, and what do
the attacks leave in memory?

Rounds without and with the attack follow each other on one server. Its folder has seven LoRAs for each of three
attackers and one for the neighbour; its cache has room for seven.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from faults.asks import Answer, Ask, image_ask
from faults.attacks import ALL, LORA_SETS, attacking
from faults.client import FaultClient
from faults.ends import End, Tally, Verdict, verdict_of
from faults.folders import write_loras
from faults.run import Say, quiet
from faults.server import RunningServer
from faults.steady import capacity_per_s
from faults.tenants import KEYS, configuration, offered
from faults.usage import own_memory, peaks
from plait_bench.benchmark import RATIO, ResultRow
from plait_bench.summary import pairwise_ratios, percentile

__all__ = ["NeighbourReport", "NeighbourRound", "NeighboursPlan", "neighbours_configuration", "neighbours_run",
           "neighbours_text"]  # fmt: skip

MAX_P95_RATIO = {"decode": 1.5, "lora": 3.0, ALL: 2.0}
MAX_HEALTH_P99_S = 0.2
MAX_GROWTH_BYTES = {"sizes": 300 << 20}
"""What is promised: the neighbour's 95th percentile by that without the attack, the 99th of `/health`, and by how much
the engine's memory grows. (A LoRA set may have programs of its own, which have another bound.)"""

KINDS = ("engine", "ingress")
"""The processes whose memory is told."""

_LORA = "neighbour"
_CLIENTS = 32
_RAMP_S = 5.0
_PROBES_PER_S = 10.0
_WATCH_S = 5.0
_AGAIN, _AGAIN_S = 3, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighboursPlan:
    """`seconds`: of each round; `share`: what the neighbour asks for, of the measured capacity, which is that of
    batches: one by one these images take more of the time, and half of it is the neighbour's.
    `steps`: of its images, as many as the API's default. `hung_s`: a request that has not ended then counts as if it
    had."""

    seconds: float = 120.0
    rounds: int = 2
    share: float = 0.15
    capacity_s: float = 20.0
    steps: int = 20
    images: int = 16
    seed: int = 1
    hung_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourRound:
    """What the neighbour got in one round: its latencies count from the scheduled times, those of refused requests not
    at all. `peak_bytes`: the most memory that each kind of process had."""

    p50_s: float
    p95_s: float
    health_p99_s: float
    ends: Tally
    peak_bytes: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "p50_s": self.p50_s, "p95_s": self.p95_s, "health_p99_s": self.health_p99_s, "ends": self.ends.to_json(),
            "peak_bytes": dict(self.peak_bytes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourReport:
    """Rounds alone and beside the attack, in turn, and the memory before the first and after the last. `attacker`: how
    A's requests ended; `killed`: processes of the server that are gone; `again_s`: how long after each attack the
    neighbour was served as before, None: not within two minutes."""

    attack: str
    capacity_per_s: float
    offered_per_s: float
    alone: Sequence[NeighbourRound]
    beside: Sequence[NeighbourRound]
    again_s: Sequence[float | None]
    before_bytes: Mapping[str, int]
    after_bytes: Mapping[str, int]
    attacker: Mapping[str, int] = field(default_factory=dict)
    killed: int = 0

    @property
    def p95_ratio(self) -> ResultRow:
        """The 95th percentile beside the attack by that alone, round by round."""
        ratios = pairwise_ratios([it.p95_s for it in self.beside], [it.p95_s for it in self.alone])
        workload = f"neighbours-{self.attack}"
        return ResultRow.of(ratios, system="beside/alone", workload=workload, metric="latency_p95_s", unit=RATIO)

    @property
    def misses(self) -> list[str]:
        """What is promised and was not so, in words."""
        found = []
        ratio, limit = self.p95_ratio.value, MAX_P95_RATIO.get(self.attack, float("inf"))
        if ratio > limit:
            found.append(f"p95 is {ratio:.2f} times of that alone, more than {limit:g}")
        ends = [it.ends for it in (*self.alone, *self.beside)]
        found += [f"only {it.ends[End.RIGHT]} of {it.total} were right" for it in ends if it.ends[End.RIGHT] < it.total]
        health_s = max(it.health_p99_s for it in self.beside)
        if health_s > MAX_HEALTH_P99_S:
            found.append(f"/health takes {health_s:.2f} s (p99), more than {MAX_HEALTH_P99_S:g}")
        if self.killed:
            found.append(f"{self.killed} processes were killed")
        if None in self.again_s:
            found.append(f"not served as before within {_AGAIN_S:g} s after the attack")
        more = self.after_bytes.get("engine", 0) - self.before_bytes.get("engine", 0)
        if more > (most := MAX_GROWTH_BYTES.get(self.attack, more)):
            found.append(f"the engine holds {more / 2**20:.0f} MiB more, at most {most / 2**20:.0f} are promised")
        return [f"{self.attack}: {miss}" for miss in found]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "attack": self.attack, "capacity_per_s": self.capacity_per_s, "offered_per_s": self.offered_per_s,
            "alone": [it.to_json() for it in self.alone], "beside": [it.to_json() for it in self.beside],
            "p95_ratio": self.p95_ratio.value, "again_s": list(self.again_s), "attacker": dict(self.attacker),
            "killed": self.killed,
            "before_bytes": dict(self.before_bytes), "after_bytes": dict(self.after_bytes), "misses": self.misses,
        }  # fmt: skip


def neighbours_configuration(folder: Path) -> str:
    """Write everybody's LoRAs, and return the plait.yaml of the run; all else is the default."""
    names = [name for names in LORA_SETS for name in names]
    nbytes = write_loras(folder, [*names, _LORA])
    return configuration(loras={"folder": str(folder)}, knobs={"host_lora_bytes": len(LORA_SETS[0]) * nbytes})


async def neighbours_run(server: RunningServer, attack: str, plan: NeighboursPlan, say: Say) -> NeighbourReport:
    """Measure the neighbour alone and beside the attack, in turn. Raises `RunFailed`."""
    async with FaultClient(server.url, hung_s=plan.hung_s, key=KEYS["b"]) as b:
        asks = _asks(attack, plan)
        expected = await quiet(b, asks, say)
        capacity = await capacity_per_s(b, asks, seconds=plan.capacity_s, clients=_CLIENTS, seed=plan.seed)
        per_s = plan.share * capacity
        say(f"{attack}: capacity {capacity:.2f} images/s; the neighbour asks for {per_s:.2f}")
        neighbour = _Neighbour(server, b, asks, expected, per_s, plan)
        before, replicas = await asyncio.to_thread(own_memory, server), server.replicas()
        alone: list[NeighbourRound] = []
        beside: list[NeighbourRound] = []
        again: list[float | None] = []
        attacker: Counter[str] = Counter()
        while len(alone) < plan.rounds and None not in again:
            alone.append(await neighbour.round())
            async with attacking(attack, server.url, turn=len(beside)) as ended:
                await asyncio.sleep(_RAMP_S)
                beside.append(await neighbour.round())
            attacker += ended
            again.append(await neighbour.again_s(within_s=2 * alone[-1].p95_s))
            say(f"{attack}, round {len(alone)}: p95 {alone[-1].p95_s:.2f} s alone, {beside[-1].p95_s:.2f} beside")
        return NeighbourReport(
            attack=attack,
            capacity_per_s=capacity,
            offered_per_s=per_s,
            alone=tuple(alone),
            beside=tuple(beside),
            again_s=tuple(again),
            before_bytes=before,
            after_bytes=await asyncio.to_thread(own_memory, server),
            attacker=dict(attacker),
            killed=len(replicas - server.replicas()),
        )


def _asks(attack: str, plan: NeighboursPlan) -> list[Ask]:
    """Return the neighbour's images: with a LoRA where that is what is attacked, half of them where all is."""
    asks = []
    for number in range(plan.images):
        with_lora = attack == "lora" or (attack == ALL and number % 2 == 1)
        loras = [{"name": _LORA, "scale": 0.5}] if with_lora else []
        fields = {"prompt": "penguin", "size": "64x64", "scheduler": "ddim", "loras": loras}
        asks.append(image_ask(f"image-{number}", seed=number, num_inference_steps=plan.steps, **fields))
    return asks


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """The tenant B, and what its images are to be."""

    server: RunningServer
    client: FaultClient
    asks: Sequence[Ask]
    expected: Mapping[str, Answer]
    per_s: float
    plan: NeighboursPlan

    async def round(self) -> NeighbourRound:
        """Ask for images at an even rate, and for the server's health."""
        async with peaks(self.server, every_s=_WATCH_S) as peak_bytes:
            images, probes = await asyncio.gather(
                offered(self._image, self.per_s, self.plan.seconds),
                offered(self._health, _PROBES_PER_S, self.plan.seconds),
            )
        ends = Tally()
        for verdict, _ in images:
            ends.add(verdict)
        counted_s = [taken_s for verdict, taken_s in images if verdict.end in (End.RIGHT, End.WRONG, End.HUNG)]
        return NeighbourRound(
            p50_s=percentile(counted_s, 0.5) if counted_s else float("inf"),
            p95_s=percentile(counted_s, 0.95) if counted_s else float("inf"),
            health_p99_s=percentile([taken_s for _, taken_s in probes], 0.99),
            ends=ends,
            peak_bytes=dict(peak_bytes),
        )

    async def again_s(self, *, within_s: float) -> float | None:
        """Ask until several images in a row come within a time; return how long that took, None: too long."""
        began_s = time.monotonic()
        quick = 0
        while quick < _AGAIN:
            if time.monotonic() - began_s > _AGAIN_S:
                return None
            asked_s = time.monotonic()
            verdict = await self._image(quick)
            quick = quick + 1 if verdict.end is End.RIGHT and time.monotonic() - asked_s <= within_s else 0
        return time.monotonic() - began_s

    async def _image(self, number: int) -> Verdict:
        ask = self.asks[number % len(self.asks)]
        return verdict_of(ask, await self.client.send(ask), self.expected[ask.key], in_our_stead=False)

    async def _health(self, _: int) -> int:
        try:
            return (await self.client.get("/health", timeout_s=self.plan.hung_s)).status_code
        except httpx2.TransportError:
            return 0


def neighbours_text(report: NeighbourReport) -> str:
    """Return the table of a report."""
    head = f"{report.attack:<10}{'p50 s':>8}{'p95 s':>8}{'health':>8}{'right':>7}{'others':>7}"
    lines = [head + "".join(f"{kind + ' MiB':>14}" for kind in KINDS)]
    for name, rounds in (("alone", report.alone), ("beside", report.beside)):
        for it in rounds:
            right = it.ends.ends[End.RIGHT]
            counts = f"{it.p50_s:>8.3f}{it.p95_s:>8.3f}{it.health_p99_s:>8.3f}{right:>7}{it.ends.total - right:>7}"
            lines.append(f"{name:<10}{counts}" + "".join(f"{it.peak_bytes[kind] / 2**20:>14.0f}" for kind in KINDS))
            lines += [f"{count:>6}  {what}" for what, count in it.ends.seen.most_common()]
    ratio = report.p95_ratio
    lines += [
        f"p95 beside by alone: {ratio.value:.2f} ({ratio.p20:.2f} to {ratio.p80:.2f}); the neighbour asks for "
        f"{report.offered_per_s:.2f}/s of {report.capacity_per_s:.2f}/s; as before after {_seconds(report.again_s)}",
        f"MiB before and after: {_grown(report)}; the attacker's requests: {report.attacker}",
    ]
    return "\n".join([*lines, *(f"MISSED: {miss}" for miss in report.misses)])


def _seconds(again_s: Sequence[float | None]) -> str:
    return ", ".join("more" if each is None else f"{each:.1f}" for each in again_s) + " s"


def _grown(report: NeighbourReport) -> str:
    return ", ".join(
        f"{kind} {report.before_bytes.get(kind, 0) / 2**20:.0f} to {report.after_bytes.get(kind, 0) / 2**20:.0f}"
        for kind in KINDS
    )
