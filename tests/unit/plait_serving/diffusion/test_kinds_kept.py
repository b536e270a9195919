"""What is remembered of sizes and LoRA files is bounded, and few of it is looked at: clients choose them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from plait_serving.diffusion.decoding import DecodeQueue
from plait_serving.diffusion.denoisers.factors import FactorStore
from plait_serving.diffusion.lora.parse import LoadedLora, LoraFormat
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.forecast import StepKind, WorkForecast, _Charges
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.values import ImageRequest
from support.engine import Rig, request, rigs

KEPT = 1_024
SIZES = [(8 * (1 + i % 64), 8 * (1 + i // 64)) for i in range(3_000)]


def of_size(width: int, height: int) -> ImageRequest:
    return request(width=width, height=height)


def key_of(width: int, height: int) -> GroupKey:
    return GroupKey(width, height, uses_cfg=True, loras=())


def test_of_three_thousand_sizes_a_thousand_are_kept() -> None:
    """Of steps, decodes and edits' images. Those that are used stay; those of before are forgotten."""
    costs = StepCosts()
    forecast = WorkForecast(costs)
    for i in range(3 * KEPT):
        pixels = 64 * (i + 1)
        for kind in (pixels, 64):  # the first one is used all the time
            forecast.charged_step(StepKind(kind, uses_cfg=True, controls=0), 1.0)
            forecast.charged_decode(kind, 1.0)
            forecast.charged_source(kind, 1.0)
            for _ in range(3):
                costs.record(key_of(kind // 8, 8), 1, 1.0)
    assert len(costs._kinds) == KEPT
    for charges in (forecast._steps, forecast._decodes, forecast._sources):
        assert len(charges._kinds) == len(charges._by_work) == KEPT
    assert costs.measured_s(key_of(8, 8), 1) == 1.0
    assert costs.measured_s(key_of(24 * KEPT, 8), 1) == 1.0
    assert costs.measured_s(key_of(16, 8), 1) is None


def test_a_forecast_looks_at_few_kinds() -> None:
    """At none but its own where that is known; else at what a search by work meets, of a thousand."""
    looked_at = []

    def work(kind: int) -> float:
        looked_at.append(kind)
        return float(kind)

    charges = _Charges(work)
    for kind in range(1, 3_001):
        charges.add(kind, 1.0)
    looked_at.clear()
    assert charges.expected(3_000) == 1.0
    assert looked_at == []
    assert charges.expected(5) == 5 / 1_977
    assert len(looked_at) <= 2 * math.log2(KEPT)
    looked_at.clear()
    charges.add(4, 1.0)
    assert len(looked_at) <= 3 * math.log2(KEPT)


def test_the_nearest_kind_is_the_one_that_a_look_at_all_finds() -> None:
    """By the ratio of their work, up by its square root, down by itself."""
    rng = np.random.default_rng(0)
    forecast, seen = WorkForecast(StepCosts()), {}
    for pixels, seconds in zip(rng.permutation(np.arange(1, 200)) * 64, rng.uniform(0.1, 9.0, 199), strict=True):
        forecast.charged_decode(int(pixels), float(seconds))
        seen[int(pixels)] = float(seconds)
        for width, height in ((8, 8), (24, 24), (72, 64), (4096, 1024)):
            wanted = width * height
            nearest = min(seen, key=lambda kind: abs(math.log(wanted / kind)))
            scale = wanted / nearest
            assert forecast.decode_s(of_size(width, height)) == pytest.approx(seen[nearest] * min(scale, scale**0.5))


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """`rig(**options)` builds a `Rig`; every one is stopped at the end."""
    yield from rigs()


def test_what_waits_is_looked_at_by_its_own_kind(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a submit nor a step with a deadline looks through what other sizes took."""
    built = rig(clock=lambda: 0.0)
    (model,) = built.engine.residents.models
    for width, height in SIZES:
        for _ in range(3):
            model.costs.record(key_of(width, height), 1, 1e-9)
        model.forecast.charged_step(StepKind.of(of_size(width, height)), 1e-9)
        model.forecast.charged_decode(width * height, 1e-9)
    looked_at, work = [], StepKind.work.fget
    monkeypatch.setattr(StepKind, "work", property(lambda kind: looked_at.append(kind) or work(kind)))
    width, height = SIZES[-1]
    assert built.ask(width=width, height=height, steps=9, deadline_s=1.0).result().images
    assert looked_at == []


def test_decodes_of_a_thousand_sizes_are_remembered() -> None:
    """By which the next one of that size is put on a thread."""
    queue = DecodeQueue(set_threads=lambda _: None, clock=lambda: 0.0)
    for i in range(3 * KEPT):
        queue.submit("a", torch.zeros(i + 1), lambda _: True)
        assert queue.run_next(stepping=False)
    queue.close()
    assert len(queue._seconds) == KEPT
    assert 3 * KEPT in queue._seconds


def test_files_that_were_loaded_are_not_remembered_for_ever() -> None:
    """Each load of a LoRA makes a token of its own, and a small cache loads the same ones all day."""
    store = FactorStore()
    for _ in range(3 * KEPT):
        assert store.takes(LoadedLora(name="a", format=LoraFormat.PEFT, factors={}, nbytes=0))
    assert len(store._taken._found) == KEPT
