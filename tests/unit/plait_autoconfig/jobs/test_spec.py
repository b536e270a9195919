"""Job files: what is read, and how what is wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.job_file import job_of, parse_job
from plait_autoconfig.jobs.spec import JobSpec
from support.tune_jobs import JOB, job, job_text

SERVICE = {"command": ["serve"], "ready": "http://127.0.0.1:{port}/health", "reserves": {"cores": "2 * replicas"}}


def refused(text: str) -> str:
    """What is said about a job file."""
    with pytest.raises(JobRefused) as caught:
        parse_job(text, folder=Path("/jobs"), source="job.yaml")
    return str(caught.value)


def test_a_job_becomes_a_space_an_objective_and_settings():
    """Knobs go by short names in the space and by deployment and knob where they are set. What runs today, the
    reference, need not be among what is tried."""
    spec = job(limits=["p99_ms <= 50"])
    assert len(spec.space.cells()) == 14
    assert str(spec.goal) == "max goodput_per_cost with p99_ms <= 50"
    assert spec.settings({"replicas": 2, "batch": 8}) == {"engine.replicas": 2, "engine.largest_batch": 8}
    assert spec.rate_per_s is None
    outside = {"replicas": 9, "batch": 3}
    assert job(reference={"config": outside}).default == outside


def test_a_given_rate_is_offered_and_may_be_missed_by_the_tolerance():
    """`at rate R` offers R, and asks for a goodput of R less the tolerance, before the limits of the job."""
    spec = job(objective="min cost at rate 20", limits=["p99_ms <= 50"], rate_tolerance=0.05)
    assert spec.rate_per_s == 20.0
    assert [str(limit) for limit in spec.goal.limits] == ["goodput_per_s >= 19", "p99_ms <= 50"]


def test_paths_start_from_the_folder_of_the_file(tmp_path):
    """A job means the same files wherever it is read from; names of built-in scenarios are no paths."""
    (tmp_path / "load.yaml").write_text(yaml.safe_dump(JOB["scenarios"][0]))
    text = job_text(scenarios=["load.yaml"], target={"config": "plait.yaml"}, library="past.journal")
    spec = parse_job(text, folder=tmp_path)
    assert spec.scenarios == (str(tmp_path / "load.yaml"),)
    assert spec.target.config == str(tmp_path / "plait.yaml")
    assert spec.library == str(tmp_path / "past.journal")
    assert job_of({**JOB, "library": "sqlite:///x"}, folder=tmp_path).library == "sqlite:///x"
    (tmp_path / "body.json").write_text("{}")
    inline = {"target": {"api": "raw"}, "mix": [{"method": "POST", "body_file": "body.json"}]}
    (scenario,) = job_of({**JOB, "scenarios": [inline]}, folder=tmp_path).scenarios
    assert scenario["mix"][0]["body_file"] == str(tmp_path / "body.json")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("low: 1", "lowest: 1", "line 5: knobs.replicas.lowest: there is no such setting"),
        ("high: 4", "high: '4'", "line 6: knobs.replicas.high: must be a valid integer, not '4'"),
        ("name: demo", "name: demo\nname: twice", "line 2: 'name' is given twice"),
        ("replicas * batch <= 16", "replicas * batch <= 0", "of 16 configurations of its knobs, `replicas * batch"),
        ("batch: 4", "btch: 4", "reference.config sets btch, which is no knob; they are replicas, batch"),
        ("name: random", "name: randm", "designer.name: there is no designer 'randm'; did you mean random?"),
        ("kind: poisson", "kind: poison", "scenarios: arrivals.kind: one of"),
        ("engine.largest_batch", "engine.replicas", "two knobs set engine.replicas"),
        ("name: demo", "name: 2026-11-21", "quote dates"),
        ("replicas * batch <= 16", r'"\ud800"', "constraints.0: not valid Unicode"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_or_field(before, after, said):
    """One sentence names the file, the line where there is one, and the field."""
    text = job_text()
    assert before in text
    message = refused(text.replace(before, after, 1))
    assert message.startswith("job.yaml")
    assert said in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limits": ["p99_ms < 50"]}, "the limit 'p99_ms < 50' cannot be read"),
        ({"objective": "min cost at rate 5", "offered": "capacity"}, "asks for a given rate, not for the capacity"),
        ({"reference": {"config": {"batch": 4}}}, "reference.config lacks replicas"),
        ({"target": {"live": {"guard": ["p99 <="]}}}, "the limit 'p99 <=' cannot be read"),
        ({"target": {"live": True}}, "target.live"),
        ({"target": {**SERVICE, "app": "images"}}, "target.app: there is no such setting for a service of yours"),
        ({"target": {**SERVICE, "apply": ["x"]}}, "target: a service has either `command`"),
        ({"target": {"command": ["x"]}}, "target: `command` needs `ready`"),
        ({"target": {"apply": ["x"]}}, "target: `apply` needs `url`"),
        ({"target": {**SERVICE, "knobs": "file"}}, "target: `file`, a YAML or JSON file, goes with `knobs: file`"),
        ({"target": {**SERVICE, "knobs": "file", "file": "x"}}, "needs {file} among the arguments"),
        ({"target": {**SERVICE, "reserves": {}}}, "goodput_per_cost needs target.reserves"),
        (
            {"target": {**SERVICE, "reserves": {"cores": "replicas - 1"}}, "prices": {"gib": 0.0}},
            "by prices and target.reserves replicas = 1, batch = 1 has none",
        ),
        ({"target": {**SERVICE, "reserves": {"cores": "wheels"}}}, "formula `wheels` names wheels, which is no knob"),
        ({"target": {**SERVICE, "reserves": {"cores": "1 - batch"}}}, "gives no number from 0 up for replicas = 1, ba"),
        (
            {"target": {"apply": ["x"], "url": "http://x"}, "prices": {"basis": "used"}},
            "prices.basis: what a service uses is only seen of one that target.command starts",
        ),
    ],
)
def test_contradictions_are_refused_before_anything_runs(changes, said):
    """What cannot work is said when the file is read."""
    assert said in refused(job_text(**changes))


def test_a_service_is_a_target_that_says_itself_where_it_is_and_what_it_costs(tmp_path):
    """Its files and its folder start from the job's; it is the same after it was stored."""
    file = {"knobs": "file", "file": "serve.yaml", "command": ["serve", "run", "{file}"]}
    spec = parse_job(job_text(target={**SERVICE, **file}), folder=tmp_path)
    assert spec.target.file == str(tmp_path / "serve.yaml")
    assert spec.target.folder == str(tmp_path)
    assert spec.target.address == "http://127.0.0.1:{port}"
    assert not spec.target.live
    assert spec.reserved_by["cores"].value({"replicas": 3, "batch": 1}) == 6.0
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_formula_names_knobs_that_always_count():
    """One that is inactive somewhere has no value there."""
    knobs = {
        "replicas": JOB["knobs"]["replicas"], "cached": {"kind": "choice", "values": [True, False]},
        "batch": {**JOB["knobs"]["batch"], "when": {"cached": [True]}},
    }  # fmt: skip
    changes = {"knobs": knobs, "reference": {"config": {"replicas": 1, "cached": False}}}
    assert job(**changes, target=SERVICE)
    said = refused(job_text(**changes, target={**SERVICE, "reserves": {"cores": "batch"}}))
    assert "formula `batch` names batch, which has no value in every configuration" in said


def test_knobs_that_set_the_same_are_never_active_together():
    """Conditions may give one setting other values beside other choices; two values at once are none."""
    wide = {"kind": "choice", "values": [8, 16], "sets": "engine.largest_batch"}
    knobs = {
        "replicas": JOB["knobs"]["replicas"],
        "batch": {**JOB["knobs"]["batch"], "when": {"replicas": [1, 2]}},
        "wide": {**wide, "when": {"replicas": [3, 4]}},
    }
    assert job(knobs=knobs, constraints=[])
    both = {**knobs, "wide": {**wide, "when": {"replicas": [2]}}}
    assert "two knobs set engine.largest_batch" in refused(job_text(knobs=both, constraints=[]))
