"""How much load searches take, in virtual time."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from plait_bench.autoconfig import synthetic
from plait_bench.autoconfig.loads import VirtualLoad, _searched, search_whole


def test_short_looks_choose_as_well_with_half_the_load() -> None:
    """On four made-up services with two seeds."""
    tasks = synthetic.suite().tasks[:4]
    found = {name: [_searched(task, name, seed) for task in tasks for seed in (0, 1)] for name in ("looks", "whole")}
    load_s = {name: fmean(each[0] for each in searches) for name, searches in found.items()}
    regret = {name: fmean(each[2] for each in searches) for name, searches in found.items()}
    assert load_s["looks"] <= 0.5 * load_s["whole"]
    assert regret["looks"] <= regret["whole"] + 0.02


def test_a_virtual_server_holds_what_it_can_and_no_more() -> None:
    """Well below its capacity it holds, above it the run ends early and answers about as many as it can."""
    load = VirtualLoad(100.0, np.random.default_rng(1))
    below = load.run(70.0, 16.0, needed_per_s=0.0, warm_up_s=2.0)
    assert below.held
    assert load.load_s == 18.0
    above = load.run(200.0, 16.0, needed_per_s=0.0, warm_up_s=2.0)
    assert not above.held
    assert load.load_s < 18.0 + 12.0
    assert 80.0 < above.answered_per_s < 120.0


def test_the_way_it_was_brackets_with_runs_of_full_length() -> None:
    """At most five of them."""
    load = VirtualLoad(100.0, np.random.default_rng(1))
    looks = search_whole(lambda rate, s: load.run(rate, s, needed_per_s=0.0, warm_up_s=2.0), 60.0)
    assert 3 <= len(looks) <= 5
    assert {look.duration_s for look in looks} == {16.0}
