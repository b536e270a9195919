"""The refresh benchmark on a small model: worker processes under load, updates meanwhile, every answer compared."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait_bench.disagg.systems.served import served
from plait_bench.disagg.workloads.refresh import LoadAnswer, Publisher, RefreshRun, wrong_answers
from plait_disagg.package import Package, open_package
from support import refresh as kit

UPDATES = 6


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Packaged once."""
    return kit.packaged(tmp_path_factory.mktemp("refresh") / "parts")


@pytest.fixture
def package(template: Package, tmp_path: Path) -> Package:
    """A test's own."""
    return open_package(kit.copied(template, tmp_path / "parts"))


@pytest.fixture
def updates(package: Package, tmp_path: Path) -> list[Path]:
    """From version 1 on; every second changes rows only."""
    found = []
    for number in range(UPDATES):
        made = kit.update(package, str(number + 1), str(number + 2), seed=number)
        found.append(kit.written(tmp_path / f"u{number}", kit.only(made, "rows" if number % 2 else "all")))
    return found


def test_a_refresh_under_load_loses_nothing_and_mixes_nothing(package, updates):
    """A CN and an HN in processes of their own; requests arrive while updates are published."""
    requests = [kit.request(package, seed) for seed in range(8)]
    with (
        served(package, "split") as (ranker, workers),
        closing(Publisher(package, updates, workers)) as publisher,
        closing(RefreshRun(ranker, requests, publisher, phase_s=1.5)) as run,
    ):
        assert run.find_rate() > 0
        for refreshed in (False, True):
            run.phase(1, refreshed=refreshed)
    assert run.publisher.published >= 1
    assert all(answer.scores is not None for answer in run.answers)
    assert {answer.version for phase in run.still for answer in phase} == {"1"}
    assert len({answer.version for phase in run.refreshed for answer in phase}) >= 2
    wrong, step = wrong_answers(package, updates, requests, run.answers)
    assert wrong == 0
    assert step > 0.01  # versions differ by more than what is let pass as the company's rounding


def test_a_wrong_answer_is_found(package, updates):
    """One of another version, one of a version that there never was, one that is off by a little; a lost one is
    counted elsewhere."""
    requests = [kit.request(package, seed) for seed in range(3)]
    right = [
        LoadAnswer(request=n, latency_s=0.0, version="1", scores=kit.scores(package, requests[n])) for n in range(3)
    ]
    wrong = [replace(right[0], version="2"), replace(right[1], version="99")]
    off = replace(right[2], scores=right[2].scores + 1e-2)
    lost = LoadAnswer(request=0, latency_s=1.0)
    assert wrong_answers(package, updates, requests, [*right, lost])[0] == 0
    fresh = open_package(package.folder)
    assert wrong_answers(fresh, updates, requests, [*right, *wrong, off, lost])[0] == 3
