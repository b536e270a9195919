"""Services that are not plait's: what a job would start, by the examples, and the answer in the form of each."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from plait.cli import main as root
from plait.config import load_config
from plait.errors import PlaitError
from plait.tuning.forms import as_argv, as_environment, as_file
from plait.tuning.job import local_run
from plait.tuning.job.applying import exported
from plait.tuning.measure.checks import METRICS, check_metrics, scenarios_of
from plait.tuning.measure.measurer import PlaitMeasurer
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.spec import JobSpec, ServiceTarget, TuningTarget
from support.tune_jobs import job_text

SERVICES = local_run.EXAMPLES / "services"


def example(name: str) -> tuple[JobSpec, ServiceTarget]:
    """A job on a service that plait's tests do not have, with its loads checked."""
    spec = parse_job((SERVICES / f"{name}.yaml").read_text(), folder=SERVICES)
    assert scenarios_of(spec)
    check_metrics(spec, METRICS)
    return spec, spec.target


def their_flags() -> argparse.ArgumentParser:
    """vLLM's and Triton's names and types for what the examples vary."""
    parser = argparse.ArgumentParser()
    for name in (
        "tensor-parallel-size", "max-num-seqs", "max-num-batched-tokens",
        "http-thread-count", "buffer-manager-thread-count", "pinned-memory-pool-byte-size",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in ("enable-prefix-caching", "enable-chunked-prefill"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    parser.add_argument("--rate-limit", choices=["off", "execution_count"])
    return parser


@pytest.mark.parametrize("name", ["vllm", "triton"])
def test_flags_are_what_the_servers_own_parser_reads(name: str) -> None:
    """Every configuration of the example, value for value; a flag that does not count is not given. Other forms are
    there for whoever has a use for them, but for a file that the job does not have."""
    spec, target = example(name)
    for cell in spec.space.cells():
        settings = spec.settings(cell)
        read = vars(their_flags().parse_args(shlex.split(exported(target, settings, "argv"))))
        assert {key.replace("_", "-"): value for key, value in read.items() if value is not None} == settings
    without = [cell for cell in spec.space.cells() if len(cell) < len(spec.knobs)]
    assert all(not cell["chunked_prefill"] for cell in without)
    assert bool(without) == (name == "vllm")
    assert exported(target, {"A": True}, "env") == "A=true\n"
    with pytest.raises(PlaitError, match=r"--as serve: the job has no target\.file"):
        exported(target, {"A": True}, "serve")


def test_a_serve_yaml_has_the_values_and_keeps_its_comments() -> None:
    """By the names of application and deployment; Ray reads the whole of it."""
    spec, target = example("ray-serve")
    config = {"replicas": 3, "cpus": 2, "ongoing": 16, "batch": 32}
    text = exported(target, spec.settings(config), "file")
    assert "# tuned by ray-serve.yaml" in text
    (deployment,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications[0].deployments
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (3, 16)
    assert deployment.user_config == {"batch": 32}
    assert deployment.ray_actor_options.num_cpus == 2.0
    assert spec.reserved_by["cores"].value(config) == 6.0


def test_values_take_the_form_of_arguments_variables_and_files(tmp_path: Path) -> None:
    """What is missing is added where it belongs; what cannot be is refused by name."""
    assert as_argv({"a-b": 1, "on": True, "off": False, "w": "x y"}) == ("--a-b=1", "--on", "--no-off", "--w=x y")
    assert as_environment({"A": 0.5, "B": True}) == {"A": "0.5", "B": "true"}
    with pytest.raises(PlaitError, match="a-b: no variable"):
        as_environment({"a-b": 1})
    path = tmp_path / "a.yaml"
    path.write_text("a:\n- name: x\n  b: 1   # one\n  c:\n- {name: y}\n")
    (as_json := tmp_path / "a.json").write_text(json.dumps(yaml.safe_load(path.read_text())))
    after = as_file(path, {"a.x.b": 2, "a.x.c.d": 3, "a.1.b": 4})
    assert yaml.safe_load(after) == {"a": [{"name": "x", "b": 2, "c": {"d": 3}}, {"name": "y", "b": 4}]}
    assert "# one" in after
    assert json.loads(as_file(as_json, {"a.x.b": 2, "a.x.c.d": 3, "a.1.b": 4})) == yaml.safe_load(after)
    for each in (path, as_json):
        with pytest.raises(PlaitError, match=rf"{each}: a\.z\.b: the list has no such entry"):
            as_file(each, {"a.z.b": 1})


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ('{"pools": {"main": {}}}', "pools.mian.size", r"there is no section pools\.mian; did you mean main\?"),
        ('{"pools": {"main": {}}}', "pool.main.size", r"there is no section pool; did you mean pools\?"),
        ('{"pools": {"main": 3}}', "pools.main.size", r"there is no section pools\.main"),
        ("5", "pools", "neither a mapping nor a list"),
        ('{"pools":', "pools", "(while parsing|Expecting)"),
    ],
)
def test_a_file_that_a_knob_does_not_fit_is_named(tmp_path: Path, suffix: str, text: str, name: str, said: str) -> None:
    """A section that is not there is misspelt: added, it would change nothing of the service."""
    (path := tmp_path / f"service{suffix}").write_text(text)
    with pytest.raises(PlaitError, match=f"^{path}: .*{said}"):
        as_file(path, {name: 1})


def test_an_answer_for_plait_is_a_plait_yaml_a_serve_yaml_and_arguments(tmp_path, capsys):
    """Each of them says the same, and what plait does not read is refused."""
    path = tmp_path / "plait.yaml"
    path.write_text("images: null\nrecommend:  # mine\n  models: {shop: {folder: /shop}}\n")
    target, settings = TuningTarget(config=str(path), app="recommend"), {"cn-shop.window": 2, "cn-shop.replicas": 3}
    path.write_text(before := path.read_text())
    (tmp_path / "tuned.yaml").write_text(exported(target, settings, "file"))
    assert path.read_text() == before
    assert "# mine" in (tmp_path / "tuned.yaml").read_text()
    words = shlex.split(exported(target, settings, "argv"))
    assert words[::2] == ["--set", "--set"]
    assert load_config(tmp_path / "tuned.yaml") == load_config(path, overrides=words[1::2])
    serve = exported(target, settings, "serve")
    assert ServeDeploySchema.model_validate(yaml.safe_load(serve)).applications
    assert root.main(["deploy", "render", str(tmp_path / "tuned.yaml")]) == 0
    assert capsys.readouterr().out == serve
    with pytest.raises(PlaitError, match="plait takes no knobs from its environment"):
        exported(target, settings, "env")


def test_an_answer_for_plait_has_what_its_job_set(tmp_path):
    """`target.settings` are part of what was measured; a knob may be one of a model that only they name."""
    path = tmp_path / "plait.yaml"
    path.write_text("images: null\nrecommend:\n  models: {v1.5: {folder: /one}}  # mine\n")
    job = {"recommend.models.v1.5.folder": "/two", "recommend.models.shop.folder": "/shop", "server.port": 7}
    job |= {
        "images": {"models": {"a.b": "emoji"}},
        "images.models.a.b": "emoji",
    }  # a name with a dot that a setting makes
    target = TuningTarget(config=str(path), app="recommend", settings=job)
    settings = {"cn-shop.window": 2}
    (tmp_path / "tuned.yaml").write_text(exported(target, settings, "file"))
    tuned = load_config(tmp_path / "tuned.yaml")
    assert tuned == load_config(path, settings=job, overrides=["recommend.models.shop.cn.knobs.window=2"])
    assert tuned == load_config(path, overrides=shlex.split(exported(target, settings, "argv"))[1::2])
    assert "port: 7" in exported(target, settings, "serve")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job and plait's state are."""
    monkeypatch.setenv("PLAIT_STATE_DIR", str(tmp_path))
    return tmp_path


def test_only_the_command_lines_own_jobs_run_commands(folder: Path) -> None:
    """Whoever makes the measurer for a job of others does not allow it, and nothing is looked at."""
    with pytest.raises(JobRefused, match="commands are run for the jobs of `plait tune run` only"):
        PlaitMeasurer(folder=folder).check(example("vllm")[0])


KNOB = {"kind": "int", "low": 1, "high": 2}


@pytest.mark.parametrize(
    ("target", "changes", "said"),
    [
        ({"command": ["no-such-program"]}, {}, "target.command: there is no program 'no-such-program'"),
        ({}, {"limits": ["quality_drift <= 1"]}, "there is no metric quality_drift"),
        ({"knobs": "file", "file": "none.yaml", "command": ["true", "{file}"]}, {}, "No such file"),
        ({"knobs": "env"}, {"knobs": {"a": KNOB, "b-c": {**KNOB, "when": {"a": [2]}}}}, "b-c: no variable"),
        (
            {"command": [], "apply": ["true"], "url": "http://x"},
            {"limits": ["memory_gib <= 4"]},
            "no metric memory_gib",
        ),
    ],
)
def test_what_can_not_be_measured_is_refused_before_it_is_started(folder, target, changes, said):
    """In a sentence, with the field; also what is wrong with a knob that does not count in the reference."""
    service = {"command": ["true"], "ready": "http://127.0.0.1:{port}/", "reserves": {"cores": 1}, **target}
    job = {"constraints": [], "knobs": {"a": KNOB}, "reference": {"config": {"a": 1}}, "offered": "given", **changes}
    with pytest.raises(JobRefused, match=said):
        PlaitMeasurer(folder=folder, commands=True).check(parse_job(job_text(**job, target=service), folder=folder))
