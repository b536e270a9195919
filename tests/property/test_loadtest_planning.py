"""Invariants of plans, over scenarios that nobody thought of."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_loadtest.arrivals import rate_profile, schedule
from plait_loadtest.distributions import cumulative, pick, pick_distinct
from plait_loadtest.errors import ScenarioError
from plait_loadtest.load import as_yaml, load_scenario
from plait_loadtest.scenario import ConstantArrivals, GammaArrivals, PoissonArrivals, RampArrivals, StepArrivals

rates = st.floats(0.01, 300)
arrivals = st.one_of(
    st.builds(ConstantArrivals, rate_per_s=rates),
    st.builds(PoissonArrivals, rate_per_s=rates),
    st.builds(GammaArrivals, rate_per_s=rates, burstiness=st.floats(0.05, 20)),
    st.builds(RampArrivals, rate_per_s=st.just(0.0) | rates, to_rate_per_s=rates),
    st.builds(
        StepArrivals,
        stages=st.lists(st.tuples(st.floats(0.01, 5), st.just(0.0) | rates), max_size=4).flatmap(
            lambda stages: st.tuples(*map(st.just, stages), st.tuples(st.floats(0.01, 5), rates))
        ),
    ),
)
run_lengths = st.floats(0.01, 10)


@settings(max_examples=150)
@given(arrivals, run_lengths, st.just(0.0) | run_lengths, st.none() | st.integers(1, 400), st.integers(0, 2**64))
def test_a_schedule_keeps_its_promises(arrivals, duration_s, warm_up_s, count, seed):
    """Ascending from 0; warm-up strictly before its end and the rest not; ended by the count or by the duration."""
    times, warm_up = schedule(arrivals, duration_s=duration_s, warm_up_s=warm_up_s, count=count, seed=seed)
    border = round(warm_up_s * 1e9)
    assert (np.diff(times, prepend=0) >= 0).all()
    assert (times[:warm_up] < border).all()
    assert (times[warm_up:] >= border).all()
    if count is None:
        assert (times < round((warm_up_s + duration_s) * 1e9)).all()
    else:
        assert times.size - warm_up == count


@settings(max_examples=150)
@given(arrivals, run_lengths, st.just(0.0) | run_lengths, st.lists(st.floats(0, 1), min_size=1))
def test_the_inverse_of_the_expected_count_is_its_inverse(arrivals, duration_s, warm_up_s, fractions):
    """Back and forth through the cumulative rate, on any profile, also over parts where the rate is 0."""
    profile = rate_profile(arrivals, duration_s=duration_s, warm_up_s=warm_up_s)
    total = profile.expected(warm_up_s + duration_s)
    expected = np.sort(np.array(fractions)) * total
    times = profile.inverse(expected)
    assert (np.diff(times) >= 0).all()
    back = [profile.expected(time) for time in times]
    assert np.allclose(back, expected, rtol=1e-6, atol=1e-6)


weights = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=30).filter(lambda values: sum(values) > 0)
uniforms = st.floats(0, 1, exclude_max=True)


def naive_pick(weights, uniform):
    """The definition: the first item whose cumulative share is above the uniform."""
    total = sum(weights)
    below = 0.0
    for index, weight in enumerate(weights):
        below += weight
        if below / total > uniform:
            return index
    return max(index for index, weight in enumerate(weights) if weight > 0)


@given(weights, uniforms)
def test_a_pick_is_what_its_definition_says(weights, uniform):
    """Against the naive loop; where rounding decides between neighbours, either is right, but none of weight 0."""
    sums = cumulative(weights)
    picked = int(pick(sums, np.array([uniform]))[0])
    assert weights[picked] > 0
    if np.abs(sums - uniform).min() > 1e-9:
        assert picked == naive_pick(weights, uniform)


@given(weights, st.lists(uniforms, min_size=1, max_size=8))
def test_distinct_picks_are_distinct_and_possible(weights, draws):
    """Whatever the weights and however small: as many different items as asked for, none of weight 0."""
    draws = draws[: sum(weight > 0 for weight in weights)]
    sums = cumulative(weights).tolist()
    picked = pick_distinct(sums, draws)
    assert len(set(picked)) == len(picked) == len(draws)
    assert all(weights[index] > 0 for index in picked)


scalars = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
)
keys = st.sampled_from(
    [
        "name", "target", "target.url", "target.headers", "target.api", "arrivals", "arrivals.kind", "arrivals.file",
        "arrivals.rate_per_s", "duration_s", "count", "seed", "mix", "mix.0", "mix.*", "mix.images.steps", "mix.0.api",
        "mix.0.loras", "mix.0.loras.count", "mix.0.controlnets.images", "mix.0.size", "limits", "slo", "slos.a.b",
        "thresholds", "needs", "a.b.c", "..", "x",
    ]
)  # fmt: skip


@settings(max_examples=200)
@given(st.dictionaries(keys, values, max_size=4))
def test_nonsense_is_refused_with_a_sentence(overrides):
    """Any settings make a scenario, or one error of ours; what is made can be shown and loaded again."""
    with contextlib.suppress(ScenarioError):
        scenario = load_scenario({}, overrides)
        assert load_scenario(yaml.safe_load(as_yaml(scenario)), {}) == scenario


@settings(max_examples=200)
@given(st.text(alphabet="ab01:-[]{}&*!?,'\"#|>%@` \n\t\u00e9\x00<.", max_size=40))
def test_a_file_of_garbage_is_refused_with_a_sentence(text):
    """Whatever a file holds: a scenario, or one error of ours."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ScenarioError):
        path = Path(folder, "garbage.yaml")
        path.write_text(text, encoding="utf-8")
        load_scenario(path, {})
