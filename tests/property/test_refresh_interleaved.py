"""Requests and updates in any order: every answer is one version's, exactly."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait_disagg.package.read import Package
from plait_disagg.values import RankAnswer
from support import refresh as kit
from support.rank_fabric import Rig

_folders = itertools.count()

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("rank"), st.integers(1, 6)),  # so many requests at once, which need not be awaited
        st.tuples(st.just("refresh"), st.sampled_from(["all", "rows", "weights"])),
        st.tuples(st.just("wait"), st.integers(0, 3)),  # milliseconds
    ),
    min_size=3,
    max_size=10,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Packaged once."""
    return kit.packaged(tmp_path_factory.mktemp("refresh") / "parts")


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.parametrize("shape", ["whole", "split"])
@given(steps=STEPS)
def test_every_answer_is_one_versions_exactly(
    template: Package, tmp_path: Path, shape: str, steps: list[tuple[str, object]]
) -> None:
    """Through a whole worker, and through two CNs and two HNs. Nothing is lost, and what is asked after an update was
    published is answered by it."""
    scratch = tmp_path / str(next(_folders))
    scratch.mkdir()
    folder = kit.copied(template, scratch / "parts")
    with Rig() as rig:
        served = kit.Whole(rig, folder) if shape == "whole" else kit.ServedPackage(rig, folder, cns=2, hns=2)
        answers = asyncio.run(_play(served, steps, scratch))
    twins = kit.version_twins(folder, scratch)
    expected: dict[tuple[str, int], torch.Tensor] = {}
    for seed, first_version, answer in answers:
        assert int(answer.version) >= first_version
        key = answer.version, seed
        if key not in expected:
            expected[key] = kit.scores(twins[answer.version], kit.request(template, seed))
        assert torch.equal(next(iter(answer.outputs.values())), expected[key])
    shutil.rmtree(scratch)


async def _play(
    served: kit.Whole | kit.ServedPackage, steps: list[tuple[str, object]], scratch: Path
) -> list[tuple[int, int, RankAnswer]]:
    """Seed, the version that was published when it was asked, and the answer, of every request."""
    await served.ready()
    seeds, versions = itertools.count(), 1
    asked: list[tuple[int, int, asyncio.Task[RankAnswer]]] = []
    for step, what in steps:
        if step == "rank":
            assert isinstance(what, int)
            asked += [
                (seed % 7, versions, asyncio.create_task(served.rank(seed % 7, cn=seed % 2)))
                for seed in itertools.islice(seeds, what)
            ]
            await asyncio.sleep(0)
        elif step == "wait":
            assert isinstance(what, int)
            await asyncio.sleep(what / 1e3)
        else:
            made = kit.update(served.package, str(versions), str(versions + 1), seed=versions)
            folder = kit.written(scratch / f"u{versions + 1}", kit.only(made, str(what)))
            await served.publish(folder)
            versions += 1
    return [(seed, first, await task) for seed, first, task in asked]
