"""Two tenants on one server: what one gets while the other floods or attacks; and many models, or many files.

A tenant beside another one's flood (`share`), or its single image behind a queue (`first-image`); beside an attack
(`neighbours-*`). Both have user keys, like everybody. `many-*` compares a server that has much with one that has
little, and `refusals-*` says how quickly a full one refuses.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
from safetensors.numpy import load_file, save_file

from plait_bench.benchmark import Reading, ResultRow, percentile, readings
from plait_bench.errors import SystemFailed
from plait_bench.faults.attacks import ALL, KEYS, LORA_SETS, attacking
from plait_bench.faults.killing import quiet
from plait_bench.faults.requests import Ask, End, Tally, Verdict, image_ask, verdict_of
from plait_bench.faults.server import Client, OnServer, Promise, Values, cancelled, offered, send_all, watched
from plait_loadtest.scenario import ClosedLoopCallers, ConstantArrivals
from plait_serving.images.config import STARTER_FOLDER, STARTER_MODEL

_CLIENTS, _RAMP_S, _SEED = 32, 5.0, 10_000
_KINDS = 64  # of images that differ


def two_tenants(**images: Any) -> dict[str, Any]:
    """Return the plait.yaml of a server for both tenants; `images` is its section of that name."""
    keys = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant} for tenant, key in KEYS.items()]
    return {"server": {"port": 0, "api_keys": keys}, "images": images, "recommend": None}


def _image(number: int, *, steps: int = 4, **more: Any) -> Ask:
    """Return the request for an image of the kind that both tenants want."""
    fields = {"prompt": "penguin", "size": "64x64", "scheduler": "ddim", **more}
    return image_ask(f"image-{number}", seed=number, num_inference_steps=steps, **fields)


class Beside(OnServer):
    """The tenant B alone, and beside what A does."""

    systems = ("alone", "beside")
    pairs: tuple[tuple[str, str], ...] = (("beside", "alone"),)

    def client(self, tenant: str = "b", *, hung_s: float = 600.0) -> Client:
        """Open a tenant's client."""
        return Client(self.server.url, hung_s=hung_s, key=KEYS[tenant])


class Flood(Beside):
    """Beside a tenant who asks over many connections without a pause, and at once again where it was refused. Both ask
    for images of the same kind, so that neither is served more cheaply."""

    def configuration(self, folder: Path) -> Mapping[str, Any]:
        """Return one with a queue that takes A's requests."""
        return two_tenants(knobs={"queue_limit": 4096, "queue_seconds": 100_000})

    async def begin(self) -> None:
        """Warm up."""
        async with self.client() as b:
            for batch in (1, 16, 16):
                await b.images([_image(number) for number in range(batch)], at_once=batch)
                await b.prepared()


class Share(Flood):
    """B offers half of what the server can do: 0.9 of its goodput alone is promised beside the flood. An answer counts
    until five seconds after it was due."""

    metrics: Mapping[str, str] = {"goodput_per_s": "images/s"}
    connections, round_s, share, within_s, lost = 64, 30.0, 0.5, 5.0, 0.1

    async def begin(self) -> None:
        """Measure the capacity: so many different images at once fill the batches."""
        await super().begin()
        asks = [_image(number) for number in range(_CLIENTS)]
        capacity = self.capacity_per_s(asks, seconds=self.round_s, clients=_CLIENTS, key=KEYS["b"])
        self.per_s = self.share * capacity
        self.say(f"B offers {self.per_s:.2f} images/s")

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Offer B's requests at an even rate, A's without a pause."""
        flood, asks = ClosedLoopCallers(concurrency=self.connections), [_image(i) for i in range(_KINDS)]
        rate, mine = ConstantArrivals(rate_per_s=self.per_s), [_image(_SEED + i) for i in range(_KINDS)]
        floods = []
        with ThreadPoolExecutor() as threads:
            if system == "beside":
                floods.append(threads.submit(self.loaded, asks, flood, _RAMP_S + self.round_s, key=KEYS["a"]))
                await asyncio.sleep(_RAMP_S)
            served = self.loaded(mine, rate, self.round_s, key=KEYS["b"], within_s=self.within_s)
        for each in floods:
            each.result()  # raises what kept A from asking: B was alone then
        return readings({"goodput_per_s": served.summary.total.goodput_per_s})

    def promises(self, values: Values) -> Iterator[Promise]:
        """Judge the goodput."""
        yield "the share of its goodput that is lost", 1.0 - values["beside/alone", "goodput_per_s"].value, self.lost


class FirstImage(Flood):
    """B's single image behind a thousand requests of A, which may delay it by one request of its kind."""

    metrics: Mapping[str, str] = {"first_image_s": "s"}
    pairs = ()
    queued, queued_s, enough = 1000, 60.0, 0.9

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Take the median of five images."""
        async with self.client("a") as a, self.client() as b:
            while await _in_flight(b):  # the queue of the last round, whose clients have left
                await asyncio.sleep(0.5)
            count = self.queued if system == "beside" else 0
            tasks = [asyncio.create_task(a.send(_image(2 * _SEED + i))) for i in range(count)]
            async with cancelled(tasks):
                until_s, waiting = time.monotonic() + self.queued_s, 0
                while waiting < self.enough * count and time.monotonic() < until_s:
                    await asyncio.sleep(0.5)
                    waiting = await _in_flight(b) + sum(task.done() for task in tasks)  # those were refused
                asks = [_image(3 * _SEED + i) for i in range(5)]
                taken_s = [(await b.images([ask], at_once=1))[0].taken_s for ask in asks]
        return readings({"first_image_s": percentile(taken_s, 0.5)})

    def promises(self, values: Values) -> Iterator[Promise]:
        """Judge the delay."""
        alone, beside = (values[system, "first_image_s"].value for system in self.systems)
        yield "the delay in requests of its kind", (beside - alone) / alone, 1.0


async def _in_flight(client: Client) -> int:
    """Return how many image requests are being served, waiting ones included."""
    lines = (await client.get("/metrics", timeout_s=60)).text.splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith("plait_requests_in_flight"))


# ---- beside attacks -------------------------------------------------------------------------------------------------

MAX_P95_RATIO: Mapping[str, float] = {"decode": 1.5, "lora": 3.0, ALL: 2.0}
MAX_HEALTH_P99_S = 0.2
MAX_GROWTH_MIB: Mapping[str, float] = {"sizes": 300.0}
"""What is promised: the neighbour's 95th percentile by that without the attack, the 99th of `/health`, and by how much
the engine's memory grows. (A LoRA set may have programs of its own, which have another bound.)"""

_LORA = "neighbour"
_AGAIN, _AGAIN_S = 3, 120.0


class Neighbour(Beside):
    """A well-behaved tenant beside one that attacks. Its folder has seven LoRAs for each of three attackers and one for
    the neighbour; the cache has room for seven.

    The neighbour asks for a share of the measured capacity, which is that of batches: one by one these images take more
    of the time, and half of it is the neighbour's.
    """

    compared = frozenset({"latency_p95_s"})
    most_rounds = 2
    metrics: Mapping[str, str] = {
        "latency_p95_s": "s", "health_p99_s": "s", "requests": "requests", "right": "requests",
        "killed": "processes", "engine_mib": "MiB", "ingress_peak_mib": "MiB",
    }  # fmt: skip
    untimed = metrics.keys() - {"latency_p95_s", "health_p99_s"}
    round_s, share = 120.0, 0.15

    def __init__(self, name: str, attack: str) -> None:
        super().__init__(name)
        self.attack = attack
        self.tally = Tally()

    def configuration(self, folder: Path) -> Mapping[str, Any]:
        """Write everybody's LoRAs; all but the cache is the default."""
        nbytes = write_loras(folder / "loras", [*(name for names in LORA_SETS for name in names), _LORA])
        knobs = {"host_lora_bytes": len(LORA_SETS[0]) * nbytes}
        return two_tenants(loras={"folder": str(folder / "loras")}, knobs=knobs)

    async def begin(self) -> None:
        """Record the neighbour's images: with a LoRA where that is what is attacked, half of them where all is."""
        loras = [{"name": _LORA, "scale": 0.5}]
        with_lora = {"lora": range(16), ALL: range(1, 16, 2)}.get(self.attack, ())
        self.asks = [_image(number, steps=20, loras=loras if number in with_lora else []) for number in range(16)]
        async with self.client(hung_s=60.0) as b:
            self.expected = await quiet(b, self.asks)
        capacity = self.capacity_per_s(self.asks, seconds=20.0, clients=_CLIENTS, key=KEYS["b"])
        self.per_s = self.share * capacity
        self.say(f"{self.attack}: capacity {capacity:.2f} images/s; the neighbour asks for {self.per_s:.2f}")
        self.before = await asyncio.to_thread(self._held_mib)
        self.replicas = await asyncio.to_thread(self.server.replicas)

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Measure the neighbour; after an attack also whether it is served as before."""
        async with self.client(hung_s=60.0) as b:
            if system == "alone":
                found = await self._served(b)
                self.usual_s = found[0].value
                return found
            with attacking(self.attack, self.server.url, turn=number - 1) as ended:
                await asyncio.sleep(_RAMP_S)
                found = await self._served(b)
            self.say(f"{self.attack}: the attacker's requests: {dict(ended)}")
            if not await self._is_served_again(b, within_s=2 * self.usual_s):
                self.missed.append(f"not served as before within {_AGAIN_S:g} s after the attack")
        return found

    async def _served(self, b: Client) -> list[Reading]:
        """Ask for images at an even rate, and for the server's health. Latencies count from the scheduled times, those
        of refused requests not at all."""
        images, probes = await asyncio.gather(
            offered(lambda number: self._verdict(b, number), self.per_s, self.round_s),
            offered(lambda _: _health(b), 10.0, self.round_s),
        )
        counted = (End.RIGHT, End.WRONG, End.HUNG)
        counted_s = [taken_s for verdict, taken_s in images if verdict.end in counted] or [float("inf")]
        right = sum(verdict.end is End.RIGHT for verdict, _ in images)
        if right < len(images):
            self.missed.append(f"only {right} of {len(images)} were right: {dict(self.tally.seen)}")
        values = {
            "latency_p95_s": percentile(counted_s, 0.95),
            "health_p99_s": percentile([taken_s for _, taken_s in probes], 0.99),
            "requests": len(images),
            "right": right,
        }
        return readings(values)

    async def _verdict(self, b: Client, number: int) -> Verdict:
        ask = self.asks[number % len(self.asks)]
        return self.tally.add(verdict_of(ask, await b.send(ask), self.expected[ask.key]))

    async def _is_served_again(self, b: Client, *, within_s: float) -> bool:
        """Ask until several images in a row come within a time; return whether that happens soon."""
        until_s, quick = time.monotonic() + _AGAIN_S, 0
        while quick < _AGAIN and time.monotonic() < until_s:
            asked_s = time.monotonic()
            verdict = await self._verdict(b, quick)
            quick = quick + 1 if verdict.end is End.RIGHT and time.monotonic() - asked_s <= within_s else 0
        return quick >= _AGAIN

    def conclude(self) -> list[ResultRow]:
        """Return what was held before the first round and after the last, and which processes are gone."""
        after, killed = self._held_mib(), len(self.replicas - self.server.replicas())
        return [
            self.row(system, metric, value)
            for system, held, gone in (("alone", self.before, 0), ("beside", after, killed))
            for metric, value in (("killed", gone), *held.items())
        ]

    def _held_mib(self) -> dict[str, float]:
        """Return what the engine holds, and the most that the ingress, which reads bodies, ever did."""
        engine, ingress = self.server.own_memory()["engine"], self.server.peak_memory("ingress")
        return {"engine_mib": engine / 2**20, "ingress_peak_mib": ingress / 2**20}

    def promises(self, values: Values) -> Iterator[Promise]:
        """Judge latency, health, memory, and what was killed."""
        more_mib = values["beside", "engine_mib"].value - values["alone", "engine_mib"].value
        ratio, never = values["beside/alone", "latency_p95_s"].value, float("inf")
        yield "p95 in times of that alone", ratio, MAX_P95_RATIO.get(self.attack, never)
        yield "seconds of /health (p99)", max(values["beside", "health_p99_s"].rounds), MAX_HEALTH_P99_S
        yield "processes that were killed", values["beside", "killed"].value, 0
        yield "MiB that the engine holds more", more_mib, MAX_GROWTH_MIB.get(self.attack, never)


async def _health(client: Client) -> None:
    with suppress(httpx2.TransportError):
        await client.get("/health", timeout_s=60.0)


def write_loras(folder: Path, names: Iterable[str]) -> int:
    """Write LoRAs of one size; return the bytes of one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, nbytes = load_file(STARTER_FOLDER / "loras" / "pixel.safetensors"), 0
    for number, name in enumerate(names):
        path = folder / f"{name}.safetensors"
        save_file({key: value * (1 + number / 100) for key, value in tensors.items()}, path)
        nbytes = path.stat().st_size
    return nbytes


# ---- many of them ---------------------------------------------------------------------------------------------------


class ManyModels(Beside):
    """One model is asked, then all, with every sampler of theirs, in memory for few."""

    systems = ("1 model", "15 models")
    pairs = ()
    most_rounds = 1
    metrics: Mapping[str, str] = {
        "engine_mib": "MiB", "requests": "requests", "broken": "requests", "killed": "processes"
    }  # fmt: skip
    untimed = metrics.keys()
    copies, memory_bytes, slack = 14, 4 << 30, 0.1

    def configuration(self, folder: Path) -> Mapping[str, Any]:
        """Copy the starter model under many names."""
        for number in range(self.copies):
            shutil.copytree(STARTER_FOLDER / STARTER_MODEL, folder / "models" / f"copy{number}")
        return two_tenants(models_folder=str(folder / "models"), memory_bytes=self.memory_bytes)

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Ask, and watch what the engine holds."""
        async with self.client(hung_s=300.0) as client:
            models = [model for model in (await client.get("/v1/models")).json()["data"] if model["kind"] == "base"]
            if len(models) != self.copies + 1:
                raise SystemFailed(f"there are {len(models)} models, not {self.copies + 1}")
            asks = [
                _image(1, model=model["id"], scheduler=name)
                for model in (models if system == self.systems[1] else models[:1])
                for name in model["schedulers"]
            ]
            before = self.server.replicas()
            async with watched(self.server.own_memory, every_s=1.0) as seen:
                replies = await send_all(client, asks * 2, at_once=2)
                await asyncio.sleep(2.0)
        values = {
            "engine_mib": max(held["engine"] for _, held in seen) / 2**20,
            "requests": len(replies),
            "broken": sum(verdict_of(*each, None).end not in (End.RIGHT, End.DOCUMENTED) for each in replies),
            "killed": len(before - self.server.replicas()),
        }
        return readings(values)

    def promises(self, values: Values) -> Iterator[Promise]:
        """Judge the memory, and that all were answered or refused in the API's form."""
        most_mib = self.memory_bytes * (1 + self.slack) / 2**20
        whats = {
            "engine_mib": ("MiB that the engine holds", most_mib),
            "killed": ("processes that were killed", 0),
            "broken": ("requests that were neither answered nor refused in the API's form", 0),
        }
        for metric, (what, most) in whats.items():
            yield what, values[self.systems[1], metric].value, most


class ManyFiles(Beside):
    """Requests are timed beside a few LoRA files and beside many."""

    few, many = 3, 3000
    systems = (f"{few} files", f"{many} files")
    pairs = ()
    most_rounds = 1
    metrics: Mapping[str, str] = {"refusal_ms": "ms", "listing_ms": "ms", "known_s": "s"}

    def configuration(self, folder: Path) -> Mapping[str, Any]:
        """Write a few files."""
        write_loras(folder / "loras", (f"few{number}" for number in range(self.few)))
        return two_tenants(loras={"folder": str(folder / "loras")})

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Time refusals, the listing, and until a new file may be named; the median of twenty."""
        if system == self.systems[1]:
            for extra in range(self.few, self.many):
                self._link(f"many{extra}.safetensors")
        refused = _image(1, size="7x7")
        async with self.client(hung_s=300.0) as client:
            await client.send(refused)
            refusals_s = [(await client.send(refused)).taken_s for _ in range(20)]
            listings_s = [(await client.get("/v1/loras")).elapsed.total_seconds() for _ in range(20)]
            known_s = await self._known_s(client, f"new-{system.partition(' ')[0]}")
        medians = {"refusal_ms": 1e3 * percentile(refusals_s, 0.5), "listing_ms": 1e3 * percentile(listings_s, 0.5)}
        return readings({**medians, "known_s": known_s})

    def _link(self, name: str) -> None:
        (self.folder / "loras" / name).hardlink_to(self.folder / "loras" / "few0.safetensors")

    async def _known_s(self, client: Client, name: str) -> float:
        """Have one more file in the folder; return the seconds until a request may name it. Raises `SystemFailed`."""
        ask, began_s = _image(1, steps=1, loras=[{"name": name}]), time.monotonic()
        self._link(f"{name}.safetensors")
        while (reply := await client.send(ask)).status == 404 and time.monotonic() - began_s < 300.0:
            await asyncio.sleep(0.05)
        if reply.status != 200:
            raise SystemFailed(f"a new LoRA is not served: {reply.status} {reply.failure} {reply.body[:200]!r}")
        return reply.began_s - began_s

    def promises(self, values: Values) -> Iterator[Promise]:
        """Judge what a request, a listing and a new file cost."""
        few, many = self.systems
        more_ms = values[many, "refusal_ms"].value - values[few, "refusal_ms"].value
        yield "more ms for each request", more_ms, 2.0
        yield "ms for /v1/loras", values[many, "listing_ms"].value, 100.0
        yield "s until a new file is known", values[many, "known_s"].value, 2.0


# ---- refusals -------------------------------------------------------------------------------------------------------


class Refusals(OnServer):
    """How quickly a server that is full says so, with many connections that ask without a pause. The client is the load
    tester's, which costs a tenth of the processor time of httpx2: both share the server's cores."""

    systems = ("plait",)
    most_rounds = 1
    metrics: Mapping[str, str] = {"refused_p99_s": "s"}
    round_s = 30.0

    def __init__(self, name: str, connections: int, max_p99_s: float) -> None:
        super().__init__(name)
        self.connections, self.max_p99_s = connections, max_p99_s

    def configuration(self, folder: Path) -> Mapping[str, Any]:
        """Return one with a short queue."""
        return {"images": {"knobs": {"queue_limit": 8}}, "recommend": None}

    async def measured(self, system: str, number: int) -> list[Reading]:
        """Ask for a while, then wait for what was asked: the slowest answers are those that count."""
        callers = ClosedLoopCallers(concurrency=self.connections)
        records = self.loaded([_image(1, steps=20)], callers, self.round_s).result.records
        refused = records[records["status"] == 429]
        taken_s = ((refused["done_ns"] - refused["scheduled_ns"]) / 1e9).tolist() or [float("inf")]
        return readings({"refused_p99_s": percentile(taken_s, 0.99)})

    def promises(self, values: Values) -> Iterator[Promise]:
        """Judge the slowest of a hundred."""
        yield "seconds of a refusal (p99)", values["plait", "refused_p99_s"].value, self.max_p99_s
