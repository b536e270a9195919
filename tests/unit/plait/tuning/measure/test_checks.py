"""Everything about a job that is refused before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import plait.tuning
from fakes.tuned_app import job_text
from plait.tuning.measure.checks import guard_of, max_replicas_config, prepare, target_config
from plait.tuning.measure.early_stop import Guard
from plait.tuning.measure.measurer import PlaitMeasurer
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.spec import JobSpec
from plait_loadtest.scenario import Scenario

EXAMPLES = Path(plait.tuning.__file__).parent / "examples"

SCENARIO: dict[str, Any] = {
    "target": {"api": "images"},
    "arrivals": {"kind": "poisson", "rate_per_s": 10},
    "duration_s": 10,
    "slo": {"latency_ms": 500},
}


def job(**changes: Any) -> JobSpec:
    """The job of `fakes.tuned_app`, changed."""
    return parse_job(job_text(**changes), folder=Path("/"))


def check(spec: JobSpec) -> tuple[Scenario, ...]:
    """As the measurer does; the scenarios."""
    return prepare(spec, target_config(spec.target, live=False))[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"knobs": {"wheels": {"kind": "int", "low": 1, "high": 4, "sets": "engine.wheels"}}}, "no knob 'wheels'"),
        ({"objective": "max nosuch"}, "no metric nosuch; there are attainment, cost_per_hour"),
        ({"limits": ["attanment >= 0.9"]}, "no metric attanment; did you mean attainment?"),
        (
            {"knobs": {"batch": {"kind": "int", "low": 1, "high": 400, "sets": "engine.largest_batch"}}},
            "engine.largest_batch cannot be 400",
        ),
        ({"scenarios": [SCENARIO | {"target": {"api": "raw"}}]}, "is for the API raw"),
        ({"scenarios": [SCENARIO | {"duration_s": 1}]}, "duration_s: 2"),
        ({"scenarios": [SCENARIO | {"slo": None}], "offered": "capacity"}, "has no slo"),
        ({"scenarios": [SCENARIO | {"arrivals": {"kind": "closed", "concurrency": 2}}], "offered": "capacity"}, "rate"),
        ({"target": {"app": "recommend", "settings": {"recommend": None}}}, "no recommendation model"),
        ({"target": {"app": "images", "deployments": ["ingress"]}}, "target.deployments"),
        ({"target": {"app": "images", "config": "/nowhere/plait.yaml"}}, "/nowhere/plait.yaml"),
    ],
)
def test_what_can_not_be_measured_is_refused(changes: dict[str, Any], says: str) -> None:
    """One sentence that names the field, before anything is started."""
    if "knobs" in changes:
        changes = {**changes, "reference": {"config": dict.fromkeys(changes["knobs"], 1)}}
    spec = job(**changes)
    with pytest.raises(JobRefused, match=says):
        check(spec)


def test_the_rate_of_the_objective_is_the_one_that_is_offered() -> None:
    """Whatever the scenario says."""
    (scenario,) = check(job(objective="min cost at rate 33", scenarios=[SCENARIO]))
    assert scenario.arrivals.rate_per_s == 33.0


def test_a_clone_serves_only_what_is_tuned() -> None:
    """To this machine alone, without keys; and what the job sets is set, in any script."""
    settings = {"server.host": "0.0.0.0", "server.api_keys": [{"sha256": "0" * 64}], "images.loras.folder": "/🦀"}
    spec = job(target={"app": "images", "settings": settings})
    config = target_config(spec.target, live=False)
    assert (config.recommend, config.server.host, config.server.api_keys) == (None, "127.0.0.1", ())
    assert config.images.loras.folder == Path("/🦀")
    assert target_config(spec.target, live=True).server.host == "0.0.0.0"


def test_a_clone_has_room_for_the_largest_configuration() -> None:
    """Ray's logical processors are counted for the most replicas of the space."""
    knobs = {"replicas": {"kind": "int", "low": 1, "high": 5, "sets": "engine.replicas"}}
    spec = job(knobs=knobs, reference={"config": {"replicas": 1}})
    config = max_replicas_config(spec, target_config(spec.target, live=False))
    assert config.images.replicas == 5


def test_a_guard_watches_what_can_be_seen_while_a_load_runs() -> None:
    """Latencies as the p95 of the last moments, and errors; anything else is refused by name."""

    def guarded(*guard: str) -> JobSpec:
        return job(target={"app": "images", "live": {"guard": list(guard)}})

    assert guard_of(guarded("p99_ms <= 300", "p95_ms <= 200", "error_rate <= 0.1")) == Guard(
        p95_ms=200.0, error_rate=0.1, every_s=1.0
    )
    assert guard_of(job()) is None
    with pytest.raises(JobRefused, match="memory_gib <= 4 cannot be watched"):
        guard_of(guarded("memory_gib <= 4"))


def test_the_live_service_is_tuned_only_by_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job alone cannot experiment on users."""
    monkeypatch.setenv("PLAIT_STATE_DIR", str(tmp_path))
    spec = job(target={"app": "images", "live": {"guard": ["p95_ms <= 200"]}})
    measurer = PlaitMeasurer(folder=tmp_path)
    with pytest.raises(JobRefused, match="--live"):
        measurer.check(spec)
    measurer = PlaitMeasurer(folder=tmp_path, live=True)
    with pytest.raises(JobRefused, match="no plait serve of this user runs on port 8000"):
        measurer.check(spec)
    measurer.close()


@pytest.mark.parametrize("name", ["images", "picks", "demo"])
def test_the_examples_are_sound_jobs(name: str) -> None:
    """They can be measured as they are, within the trials and minutes that they promise."""
    spec = parse_job((EXAMPLES / f"{name}.yaml").read_text(), folder=EXAMPLES)
    check(spec)
    assert spec.reference.why
    assert spec.budget.trials <= 12
    assert spec.default in spec.space.cells()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda job: job["scenarios"][0]["target"].update(model="nosuch"), "the model 'nosuch'; the .* has picks"),
        (lambda job: job["scenarios"][0]["mix"][0]["inputs"][0].update(name="agebnd"), "an input 'agebnd'; picks has"),
        (lambda job: job["scenarios"][0]["mix"][0]["inputs"].pop(), "lacks the input 'popularity' of picks"),
        (lambda job: job["scenarios"][0]["mix"][0].update(outputs=["nosuch"]), "an output 'nosuch'; picks has score"),
        (lambda job: job["scenarios"][0]["mix"][0].pop("inputs"), "an input 'dense'; picks has"),
        (lambda job: job.update(trial_limit_s=14), "trial_limit_s: 14 s end before the loads, which take 14 s"),
    ],
)
def test_a_load_that_the_model_would_refuse_is_refused(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    """Before Ray is started for it: every request of every trial would fail."""
    spec = yaml.safe_load((EXAMPLES / "picks.yaml").read_text())
    change(spec)
    with pytest.raises(JobRefused, match=says):
        check(parse_job(yaml.safe_dump(spec), folder=EXAMPLES))
