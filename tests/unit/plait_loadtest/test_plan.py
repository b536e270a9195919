"""Plans, and the scenarios that come with the package."""

from __future__ import annotations

import json
import secrets

import numpy as np
import pytest
from scipy import stats

from plait_loadtest.errors import ScenarioError
from plait_loadtest.load import as_yaml, builtin_names, load_scenario
from plait_loadtest.plan import make_plan
from plait_loadtest.scenario import RawClass, Scenario
from plait_serving.http.images.schemas import EditBody, GenerationBody


@pytest.fixture
def trace(tmp_path):
    """A small trace in the form of the public one."""
    path = tmp_path / "trace.csv"
    path.write_text("gmt_create\n2024-11-01 00:00:00\n" + "".join(f"2024-11-{day} 00:{minute:02}:00\n"
                    for day in ("05", "06") for minute in range(60)))  # fmt: skip
    return path


@pytest.mark.parametrize("name", builtin_names())
def test_a_built_in_scenario_can_be_run_as_it_is(name, trace, tmp_path):
    """It loads, plans and builds its first 50 requests, and plait's own schema takes those of the images API. As
    YAML and by way of JSON, as reports keep it, it is the same."""
    scenario = load_scenario(name, {"arrivals.file": trace} if name == "genai-trace" else {})
    path = tmp_path / "shown.yaml"
    path.write_text(as_yaml(scenario))
    assert load_scenario(path, {}) == scenario
    assert load_scenario(json.loads(json.dumps(scenario.model_dump(mode="json"))), {}) == scenario
    assert scenario.name == name
    plan = make_plan(scenario)
    assert plan.scheduled_ns.size > plan.warm_up
    for index in range(50 if scenario.target.api == "images" else 5):
        request = plan.mix.build(index)
        if scenario.target.api == "images":
            schema = EditBody if request.path.endswith("/edits") else GenerationBody
            schema.model_validate_json(request.body)
        else:
            assert len(request.body) > 1000


def test_the_streams_of_a_plan_are_independent():
    """Another rate moves no request and no cancellation; a cancellation rate moves no arrival and no request."""
    base = make_plan(load_scenario("smoke", {"limits.cancel_rate": 0.5}))
    faster = make_plan(load_scenario("smoke", {"limits.cancel_rate": 0.5, "arrivals.rate_per_s": 100}))
    without = make_plan(load_scenario("smoke", {}))
    common = base.scheduled_ns.size
    assert [base.mix.build(i) for i in range(20)] == [faster.mix.build(i) for i in range(20)]
    assert np.array_equal(base.cancelled, faster.cancelled[:common])
    assert np.array_equal(base.scheduled_ns, without.scheduled_ns)
    assert not without.cancelled.any()


def test_cancellations_have_their_rate():
    """20,000 requests: a binomial number, outside these bounds once in a million."""
    raw = {"target": {"api": "raw"}, "arrivals": {"kind": "constant", "rate_per_s": 2000}, "duration_s": 10}
    for seed, chance in ((0, 1e-3), (secrets.randbits(62), 1e-6)):
        plan = make_plan(load_scenario(raw, {"limits.cancel_rate": 0.1, "seed": seed}))
        assert plan.cancelled.shape == (20_000,)
        law = stats.binom(20_000, 0.1)
        assert law.ppf(chance / 2) <= plan.cancelled.sum() <= law.isf(chance / 2), f"seed {seed}"


def test_a_closed_loop_has_callers_and_no_schedule():
    """Nothing is drawn ahead; the mix has requests without end."""
    scenario = load_scenario("smoke", {"arrivals.kind": "closed", "arrivals.concurrency": 3, "count": 9})
    plan = make_plan(scenario)
    assert (plan.scheduled_ns.size, plan.cancelled.size, plan.warm_up) == (0, 0, 0)
    assert scenario.callers == 3
    kinds = [plan.mix.kinds[plan.mix.kind(index)] for index in range(2000)]
    assert kinds.count("plain") / 2000 == pytest.approx(0.6, abs=0.06)  # seed 0; 5 standard errors


def test_a_scenario_made_in_code_is_checked_too():
    """`make_plan` refuses what `load_scenario` would have refused."""
    with pytest.raises(ScenarioError, match=r"mix\.0\.api: is raw, but target\.api is images"):
        make_plan(Scenario(mix=(RawClass(),)))
