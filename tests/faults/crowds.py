"""What many models, or many files, cost a server that nobody attacks, beside the same with few of them."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.asks import Ask, image_ask
from faults.client import FaultClient, Reply
from faults.ends import ERROR_MEMBERS
from faults.folders import copy_models, write_loras
from faults.load import send_all
from faults.run import RunFailed, Say, prepared
from faults.server import RunningServer
from faults.tenants import KEYS, configuration
from faults.usage import peaks
from plait_bench.summary import percentile

__all__ = ["CROWDS", "UNITS", "CrowdReport", "crowd_text"]

UNITS = {
    "engine_mib": "MiB",
    "requests": "requests",
    "answered": "requests",
    "refused": "requests",
    "broken": "requests",
    "killed": "processes",
    "refusal_ms": "ms",
    "unknown_ms": "ms",
    "listing_ms": "ms",
    "first_ms": "ms",
    "image_s": "s",
    "known_s": "s",
}
"""What is measured, by metric."""

_MODELS = 14
_MODELS_BYTES = 4 << 30
_MODELS_SLACK = 0.1
_SAMPLERS_ROUNDS = 2
_AT_ONCE = 2
_WATCH_S = 1.0

_FEW, _MANY = 3, 3000
_MORE_MS, _LISTING_MS, _KNOWN_S = 2.0, 100.0, 2.0
_TIMES = 20
_IMAGES_AT_ONCE, _IMAGE_ROUNDS = 8, 5
_POLL_S = 0.05
_HUNG_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdReport:
    """The values of each metric of `UNITS`, with few and with many."""

    name: str
    few: str
    many: str
    values: Mapping[str, Mapping[str, Sequence[float]]]
    misses: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"crowd": self.name, **self.values, "misses": list(self.misses)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """A run: `prepare` fills a folder and returns the plait.yaml, `run` measures."""

    prepare: Callable[[Path], str]
    run: Callable[[RunningServer, Path, Say], Awaitable[CrowdReport]]


def _models_configuration(folder: Path) -> str:
    copy_models(folder, (f"copy{number}" for number in range(_MODELS)))
    return configuration(models_folder=str(folder), memory_bytes=_MODELS_BYTES)


async def _models_run(server: RunningServer, _: Path, say: Say) -> CrowdReport:
    """Ask one model, then all, with every sampler of theirs, and watch what the engine holds."""
    async with FaultClient(server.url, hung_s=_HUNG_S, key=KEYS["b"]) as client:
        models = [model for model in (await client.get("/v1/models")).json()["data"] if model["kind"] == "base"]
        if len(models) != _MODELS + 1:
            raise RunFailed(f"there are {len(models)} models, not {_MODELS + 1}")
        values = {}
        for name, asked in (("1 model", models[:1]), (f"{len(models)} models", models)):
            values[name] = await _sampled(server, client, asked)
            say(f"{name}: {values[name]}")
    few, many = values
    misses = []
    limit = _MODELS_BYTES * (1 + _MODELS_SLACK) / 2**20
    if max(values[many]["engine_mib"]) > limit:
        misses.append(f"the engine holds {max(values[many]['engine_mib']):.0f} MiB, more than {limit:.0f}")
    if killed := sum(values[many]["killed"]):
        misses.append(f"{killed:g} processes were killed")
    if broken := sum(values[many]["broken"]):
        misses.append(f"{broken:g} requests were neither answered nor refused in the API's form")
    return CrowdReport(name="models", few=few, many=many, values=values, misses=misses)


async def _sampled(
    server: RunningServer, client: FaultClient, models: Iterable[Mapping[str, Any]]
) -> dict[str, list[float]]:
    asks = [_sampler_ask(model["id"], name) for model in models for name in model["schedulers"]]
    before = server.replicas()
    async with peaks(server, every_s=_WATCH_S) as peak_bytes:
        replies = await send_all(client, asks * _SAMPLERS_ROUNDS, at_once=_AT_ONCE)
        await asyncio.sleep(2 * _WATCH_S)
    ended = Counter(_end_of(reply) for _, reply in replies)
    counts = {"requests": ended.total(), **{name: ended[name] for name in ("answered", "refused", "broken")}}
    counts["killed"] = len(before - server.replicas())
    return {"engine_mib": [peak_bytes["engine"] / 2**20], **{name: [float(count)] for name, count in counts.items()}}


def _sampler_ask(model: str, scheduler: str) -> Ask:
    key = f"{model}-{scheduler}"
    return image_ask(key, model=model, prompt="fish", seed=1, size="64x64", scheduler=scheduler, num_inference_steps=4)


def _end_of(reply: Reply) -> str:
    """Return whether a request was answered, refused in the API's form, or neither."""
    if reply.status == 200 and reply.failure is None:
        return "answered"
    try:
        return "refused" if set(json.loads(reply.body)["error"]) == ERROR_MEMBERS else "broken"
    except (ValueError, KeyError, TypeError):
        return "broken"


def _files_configuration(folder: Path) -> str:
    write_loras(folder, (f"few{number}" for number in range(_FEW)), rank=1)
    return configuration(loras={"folder": str(folder)})


async def _files_run(server: RunningServer, folder: Path, say: Say) -> CrowdReport:
    """Time requests beside a few LoRA files and beside many."""
    async with FaultClient(server.url, hung_s=_HUNG_S, key=KEYS["b"]) as client:
        await send_all(client, [_image(number) for number in range(3 * _IMAGES_AT_ONCE)], at_once=_IMAGES_AT_ONCE)
        await prepared(client)
        values = {f"{_FEW} files": await _timed(client, folder / "new0.safetensors")}
        for number in range(_FEW, _MANY):
            _copy(folder / f"many{number}.safetensors")
        values[f"{_MANY} files"] = await _timed(client, folder / "new1.safetensors")
        say(str(values))
    few, many = values
    more_ms = percentile(values[many]["refusal_ms"], 0.5) - percentile(values[few]["refusal_ms"], 0.5)
    listing_ms, known_s = percentile(values[many]["listing_ms"], 0.5), max(values[many]["known_s"])
    misses = [f"{_MANY} files cost a request {more_ms:.1f} ms, more than {_MORE_MS:g}"] if more_ms > _MORE_MS else []
    if listing_ms > _LISTING_MS:
        misses.append(f"/v1/loras takes {listing_ms:.0f} ms, more than {_LISTING_MS:g}")
    if known_s > _KNOWN_S:
        misses.append(f"a new file is known after {known_s:.1f} s, more than {_KNOWN_S:g}")
    return CrowdReport(name="files", few=few, many=many, values=values, misses=misses)


async def _timed(client: FaultClient, new: Path) -> dict[str, Sequence[float]]:
    refused = image_ask("refused", prompt="fish", size="7x7")
    unknown = image_ask("unknown", prompt="fish", loras=[{"name": "fow1"}])
    first = await client.send(refused)
    refusal_ms = [1e3 * (await client.send(refused)).taken_s for _ in range(_TIMES)]
    unknown_ms = [1e3 * (await client.send(unknown)).taken_s for _ in range(_TIMES)]
    listing_ms = []
    for _ in range(_TIMES):
        began_s = time.monotonic()
        await client.get("/v1/loras")
        listing_ms.append(1e3 * (time.monotonic() - began_s))
    image_s = []
    for _ in range(_IMAGE_ROUNDS):
        asks = [_image(number) for number in range(_IMAGES_AT_ONCE)]
        replies = [reply for _, reply in await send_all(client, asks, at_once=_IMAGES_AT_ONCE)]
        if bad := next((reply for reply in replies if reply.status != 200), None):
            raise RunFailed(f"no image: {bad.status} {bad.failure} {bad.body[:200]!r}")
        image_s.append(percentile([reply.taken_s for reply in replies], 0.5))
    return {
        "first_ms": [1e3 * first.taken_s],
        "refusal_ms": refusal_ms,
        "unknown_ms": unknown_ms,
        "listing_ms": listing_ms,
        "image_s": image_s,
        "known_s": [await _known_s(client, new)],
    }


def _image(number: int) -> Ask:
    return image_ask(f"image-{number}", prompt="fish", seed=number, size="64x64", num_inference_steps=4)


async def _known_s(client: FaultClient, new: Path) -> float:
    """Have one more file in the folder; return the seconds until a request may name it."""
    ask = image_ask(new.stem, prompt="fish", size="64x64", num_inference_steps=1, loras=[{"name": new.stem}])
    _copy(new.with_name(f".{new.name}")).rename(new)
    began_s = time.monotonic()
    while True:
        reply = await client.send(ask)
        if reply.status == 200:
            return reply.began_s - began_s
        if reply.status != 404 or time.monotonic() - began_s > _HUNG_S:
            raise RunFailed(f"a new LoRA is not served: {reply.status} {reply.failure} {reply.body[:200]!r}")
        await asyncio.sleep(_POLL_S)


def _copy(new: Path) -> Path:
    return shutil.copyfile(new.parent / "few0.safetensors", new)


CROWDS: Mapping[str, Crowd] = {
    "models": Crowd(prepare=_models_configuration, run=_models_run),
    "files": Crowd(prepare=_files_configuration, run=_files_run),
}
"""The runs by name."""


def crowd_text(report: CrowdReport) -> str:
    """Return the table of a report."""
    lines = [f"{report.name:<12}{report.few:>12}{report.many:>12}"]
    for metric in UNITS:
        if metric in report.values[report.many]:
            shown = [report.values[system].get(metric) for system in (report.few, report.many)]
            lines.append(
                f"{metric:<12}" + "".join(f"{percentile(each, 0.5) if each else float('nan'):>12.4g}" for each in shown)
            )
    return "\n".join([*lines, *(f"MISSED: {miss}" for miss in report.misses)])
