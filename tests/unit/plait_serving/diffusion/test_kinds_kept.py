"""What is remembered of sizes and LoRA files is bounded, and few of it is looked at: clients choose them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fakes.engine import key_of, size_of
from plait_serving.diffusion.families.factors import FactorStore
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.forecast import WorkForecast
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.values import Edit, ImageRequest
from support.engine import request

KEPT = 1_024


def of_size(width: int, height: int) -> ImageRequest:
    return request(width=width, height=height)


def group_of(width: int, height: int) -> GroupKey:
    return key_of(of_size(width, height))


@pytest.mark.parametrize("what", ["steps", "decodes", "sources"])
def test_of_three_thousand_sizes_a_thousand_are_kept(what: str) -> None:
    """Those that are used stay; of those of before the nearest is scaled, here to less."""
    forecast = WorkForecast(StepCosts())
    edit = Edit(image=np.zeros((8, 8, 3), np.uint8)) if what == "sources" else None
    asked = [request(width=8 * (i + 1), height=8, steps=1, edit=edit) for i in range(3 * KEPT)]
    for one in asked:
        for each in (one, asked[0]):  # which is used all the time
            pixels = each.width * each.height
            if what == "steps":
                forecast.charged_step(size_of(each), 1.0)
            elif what == "decodes":
                forecast.decodes.add(pixels, 1.0)
            else:
                forecast.sources.add(pixels, 1.0)
    told_s = [forecast.work_s(one, size_of(one)) for one in asked]
    assert [i for i, seconds in enumerate(told_s) if seconds == 1.0] == [0, *range(2 * KEPT + 1, 3 * KEPT)]
    assert min(told_s) > 0.0


def test_of_three_thousand_kinds_of_groups_a_thousand_costs_are_kept() -> None:
    """As of sizes."""
    costs = StepCosts()
    for width in range(8, 8 * (3 * KEPT + 1), 8):
        for each in (width, 8):
            for _ in range(3):
                costs.record(group_of(each, 8), 1, 1.0)
    known = [width for width in range(8, 8 * (3 * KEPT + 1), 8) if costs.measured_s(group_of(width, 8), 1) is not None]
    assert known == [8, *range(8 * (2 * KEPT + 2), 8 * (3 * KEPT + 1), 8)]


def test_a_forecast_looks_at_few_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """At none but its own where that is known; else at what a search by work meets, of a thousand."""
    looked_at, work = [], RowKind.work.fget
    monkeypatch.setattr(RowKind, "work", property(lambda kind: looked_at.append(kind) or work(kind)))
    forecast = WorkForecast(StepCosts())
    asked = [request(width=8 * (i + 1), height=8, steps=1) for i in range(3_000)]
    for one in asked:
        forecast.charged_step(size_of(one), 1.0)
    looked_at.clear()
    assert forecast.work_s(asked[-1], size_of(asked[-1])) == 1.0
    assert looked_at == []
    assert forecast.work_s(asked[4], size_of(asked[4])) == 5 / 1_977
    assert len(looked_at) <= 2 * math.log2(KEPT)
    looked_at.clear()
    forecast.charged_step(size_of(asked[3]), 1.0)
    assert len(looked_at) <= 3 * math.log2(KEPT)


def test_the_nearest_kind_is_the_one_that_a_look_at_all_finds() -> None:
    """By the ratio of their work, up by its square root, down by itself."""
    rng = np.random.default_rng(0)
    forecast, seen = WorkForecast(StepCosts()), {}
    for pixels, seconds in zip(rng.permutation(np.arange(1, 200)) * 64, rng.uniform(0.1, 9.0, 199), strict=True):
        forecast.decodes.add(int(pixels), float(seconds))
        seen[int(pixels)] = float(seconds)
        for width, height in ((8, 8), (24, 24), (72, 64), (4096, 1024)):
            wanted = width * height
            nearest = min(seen, key=lambda kind: abs(math.log(wanted / kind)))
            scale = wanted / nearest
            assert forecast.decode_s(of_size(width, height)) == pytest.approx(seen[nearest] * min(scale, scale**0.5))


def test_files_that_were_loaded_are_not_remembered_for_ever() -> None:
    """Each load of a LoRA makes a token of its own, and a small cache loads the same ones all day."""
    looks = 0

    class Layer:
        """One that no program has."""

        component = "unet"

        def __str__(self) -> str:
            nonlocal looks
            looks += 1
            return "layer"

    def file() -> LoadedLora:
        return LoadedLora(name="a", factors={Layer(): None}, nbytes=0)

    store, first = FactorStore("unet"), file()
    for one in (first, first, *(file() for _ in range(KEPT)), first):
        assert not store.takes(one)
    assert looks == KEPT + 2
