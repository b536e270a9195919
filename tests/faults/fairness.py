"""Two tenants on one server: what the one gets while the other floods, and how long its first image takes then.

The tenant A asks over many connections without a pause, and at once again where it was refused. The tenant B offers a
steady share of what the server can do. Both ask for images of the same kind, so that neither is served more cheaply.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from faults.asks import Ask, image_ask
from faults.client import FaultClient, Reply
from faults.run import RunFailed, Say, prepared
from faults.server import RunningServer
from faults.steady import capacity_per_s
from faults.tenants import KEYS, cancelled, configuration, offered
from plait_bench.benchmark import RATIO, ResultRow
from plait_bench.summary import pairwise_ratios, percentile

__all__ = ["FairnessPlan", "FairnessReport", "fairness_configuration", "fairness_run", "fairness_text"]

MIN_GOODPUT_RATIO = 0.9
MAX_FIRST_DELAY = 1.0
"""What is promised to a tenant at its fair share while another one floods; the second in requests of its own kind."""

_AGAIN_S = 0.1
"""How long A waits after a refusal; it does not do what retry-after says."""

_CLIENTS = 32
_RAMP_S = 5.0
_QUEUED_S = 60.0
_QUEUED_SHARE = 0.9
_FIRST_IMAGES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessPlan:
    """`share`: what B offers, of the measured capacity. `within_s`: an answer counts as goodput until then."""

    seconds: float = 30.0
    rounds: int = 3
    connections: int = 64
    queued: int = 1000
    share: float = 0.5
    steps: int = 4
    within_s: float = 5.0
    seed: int = 1
    hung_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRound:
    """What B got in one round: answers per second in time, and its latencies, which count from the scheduled times."""

    goodput_per_s: float
    p50_s: float
    p99_s: float
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessReport:
    """B's rounds alone and beside the flood, in turn; its first images alone and behind A's queue, in seconds.
    `queued`: A's requests that were in the server when B came."""

    capacity_per_s: float
    offered_per_s: float
    alone: Sequence[ServiceRound]
    beside: Sequence[ServiceRound]
    first_alone_s: Sequence[float]
    first_beside_s: Sequence[float]
    queued: int
    flood_answers: Sequence[int] = field(default_factory=tuple)

    @property
    def goodput_ratio(self) -> ResultRow:
        """B's goodput beside the flood by that alone, round by round."""
        ratios = pairwise_ratios([it.goodput_per_s for it in self.beside], [it.goodput_per_s for it in self.alone])
        return ResultRow.of(ratios, system="beside/alone", workload="share", metric="goodput_per_s", unit=RATIO)

    @property
    def first_delay(self) -> float:
        """How many requests of its own kind B's first image was delayed by, in the median."""
        alone_s = percentile(self.first_alone_s, 0.5)
        return (percentile(self.first_beside_s, 0.5) - alone_s) / alone_s

    @property
    def misses(self) -> list[str]:
        """What is promised and was not so, in words."""
        found = []
        if self.goodput_ratio.value < MIN_GOODPUT_RATIO:
            found.append(f"goodput beside the flood is {self.goodput_ratio.value:.2f} of that alone")
        if self.first_delay > MAX_FIRST_DELAY:
            found.append(f"the first image was delayed by {self.first_delay:.2f} requests of its kind")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""

        def rounds(of: Sequence[ServiceRound]) -> list[dict[str, float]]:
            return [
                {"goodput_per_s": it.goodput_per_s, "p50_s": it.p50_s, "p99_s": it.p99_s, "refused": it.refused}
                for it in of
            ]

        return {
            "capacity_per_s": self.capacity_per_s,
            "offered_per_s": self.offered_per_s,
            "alone": rounds(self.alone),
            "beside": rounds(self.beside),
            "goodput_ratio": self.goodput_ratio.value,
            "flood_answers": list(self.flood_answers),
            "first_alone_s": list(self.first_alone_s),
            "first_beside_s": list(self.first_beside_s),
            "first_delay_requests": self.first_delay,
            "queued": self.queued,
            "misses": self.misses,
        }


def fairness_configuration() -> str:
    """Return the plait.yaml of the run: two tenants, and a queue that takes A's requests."""
    return configuration(knobs={"queue_limit": 4096, "queue_seconds": 100_000})


async def fairness_run(server: RunningServer, plan: FairnessPlan, say: Say) -> FairnessReport:
    """Measure B alone and beside the flood, in turn, and its first image. Raises `RunFailed`."""
    async with (
        FaultClient(server.url, hung_s=plan.hung_s, key=KEYS["a"]) as a,
        FaultClient(server.url, hung_s=plan.hung_s, key=KEYS["b"]) as b,
    ):
        await _warm_up(b, plan)
        many = [_ask(plan, number) for number in range(_CLIENTS)]  # so many at once fill the batches
        capacity = await capacity_per_s(b, many, seconds=plan.seconds, clients=_CLIENTS, seed=plan.seed)
        per_s = plan.share * capacity
        say(f"capacity {capacity:.2f} images/s; B offers {per_s:.2f}")
        alone, beside, flood_answers = [], [], []
        for number in range(1, plan.rounds + 1):
            alone.append(await _service(b, per_s, plan))
            async with _flood(a, plan) as answers:
                await asyncio.sleep(_RAMP_S)
                before = len(answers)
                beside.append(await _service(b, per_s, plan))
                flood_answers.append(len(answers) - before)
            say(f"round {number}: {alone[-1].goodput_per_s:.2f} in time/s alone, {beside[-1].goodput_per_s:.2f} beside")
        first_alone = await _first_images(b, plan)
        async with _queue(a, b, plan) as queued:
            first_beside = await _first_images(b, plan)
        return FairnessReport(
            capacity_per_s=capacity,
            offered_per_s=per_s,
            alone=tuple(alone),
            beside=tuple(beside),
            first_alone_s=first_alone,
            first_beside_s=first_beside,
            queued=queued,
            flood_answers=tuple(flood_answers),
        )


def _ask(plan: FairnessPlan, seed: int) -> Ask:
    return image_ask(
        f"image-{seed}", prompt="penguin", seed=seed, size="64x64", num_inference_steps=plan.steps, scheduler="ddim"
    )


async def _warm_up(client: FaultClient, plan: FairnessPlan) -> None:
    for batch in (1, 16, 16):
        replies = await asyncio.gather(*(client.send(_ask(plan, i)) for i in range(batch)))
        if bad := next((reply for reply in replies if reply.status != 200), None):
            raise RunFailed(f"no image on a quiet server: {bad.status} {bad.failure} {bad.body[:200]!r}")
        await prepared(client)


async def _service(client: FaultClient, per_s: float, plan: FairnessPlan) -> ServiceRound:
    """Offer requests at an even rate, and say what became of them."""
    taken = await offered(lambda number: client.send(_ask(plan, 10_000 + number)), per_s, plan.seconds)
    right_s = [latency_s for reply, latency_s in taken if reply.status == 200]
    return ServiceRound(
        goodput_per_s=sum(latency_s <= plan.within_s for latency_s in right_s) / plan.seconds,
        p50_s=percentile(right_s, 0.5) if right_s else float("inf"),
        p99_s=percentile(right_s, 0.99) if right_s else float("inf"),
        refused=sum(reply.status == 429 for reply, _ in taken),
    )


@asynccontextmanager
async def _flood(client: FaultClient, plan: FairnessPlan) -> AsyncIterator[list[Reply]]:
    """Ask over all of A's connections without a pause; yield its answers, which grow."""
    answers: list[Reply] = []

    async def one(number: int) -> None:
        while True:
            reply = await client.send(_ask(plan, number))
            if reply.status == 200:
                answers.append(reply)
            else:
                await asyncio.sleep(_AGAIN_S)

    async with cancelled([asyncio.create_task(one(number)) for number in range(plan.connections)]):
        yield answers


@asynccontextmanager
async def _queue(a: FaultClient, b: FaultClient, plan: FairnessPlan) -> AsyncIterator[int]:
    """Have all of A's requests in the server's queue, as many as it takes; yield how many those are."""
    began_s = time.monotonic()
    tasks = [asyncio.create_task(a.send(_ask(plan, 20_000 + i))) for i in range(plan.queued)]
    async with cancelled(tasks):
        waiting = 0
        while waiting < _QUEUED_SHARE * plan.queued and time.monotonic() < began_s + _QUEUED_S:
            await asyncio.sleep(0.5)
            waiting = await _in_flight(b)
            if sum(task.done() for task in tasks) + waiting >= plan.queued:
                break  # the others were refused
        yield waiting


async def _in_flight(client: FaultClient) -> int:
    """Return how many image requests are being served, waiting ones included."""
    lines = (await client.get("/metrics", timeout_s=60)).text.splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("plait_requests_in_flight"))


async def _first_images(client: FaultClient, plan: FairnessPlan) -> list[float]:
    """Return how long each of some single requests takes."""
    taken_s = []
    for i in range(_FIRST_IMAGES):
        reply = await client.send(_ask(plan, 30_000 + i))
        if reply.status != 200:
            raise RunFailed(f"B's single request was refused: {reply.status} {reply.body[:200]!r}")
        taken_s.append(reply.taken_s)
        await asyncio.sleep(1.0)
    return taken_s


def fairness_text(report: FairnessReport) -> str:
    """Return the table of a report."""
    lines = [f"{'B':<10}{'in time/s':>10}{'p50 s':>8}{'p99 s':>8}{'refused':>8}"]
    for name, rounds in (("alone", report.alone), ("beside A", report.beside)):
        lines += [
            f"{name:<10}{it.goodput_per_s:>10.2f}{it.p50_s:>8.2f}{it.p99_s:>8.2f}{it.refused:>8}" for it in rounds
        ]
    ratio = report.goodput_ratio
    lines += [
        f"goodput beside the flood by alone: {ratio.value:.2f} ({ratio.p20:.2f} to {ratio.p80:.2f}); B offers "
        f"{report.offered_per_s:.2f}/s of {report.capacity_per_s:.2f}/s",
        f"first image: {percentile(report.first_alone_s, 0.5):.2f} s alone, "
        f"{percentile(report.first_beside_s, 0.5):.2f} s behind {report.queued} requests of A: delayed by "
        f"{report.first_delay:.2f} requests of its kind",
    ]
    return "\n".join([*lines, *(f"MISSED: {miss}" for miss in report.misses)])
