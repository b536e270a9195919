"""Scenarios from names, files, mappings and flags; what is wrong is one sentence that names the field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from plait_loadtest import scenario as scenario_module
from plait_loadtest.errors import ScenarioError
from plait_loadtest.load import as_yaml, load_scenario, path_settings
from plait_loadtest.scenario import GammaArrivals, PoissonArrivals, RampArrivals, Scenario, TraceArrivals


def refused(source, overrides=None) -> str:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(source, overrides or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_mapping_is_the_default_scenario():
    """Nothing needs to be said; the class of the mix has the target's API."""
    assert load_scenario({}, {}) == Scenario()
    assert load_scenario({"target": {"api": "raw"}}, {}).mix[0].api == "raw"
    assert load_scenario({}, {"target.api": "raw"}).mix[0].api == "raw"


def test_overrides_reach_every_part():
    """Dotted settings; a class by position, by name or all at once; headers; whole values."""
    scenario = load_scenario(
        {"mix": [{"name": "a"}, {"name": "b"}]},
        {
            "duration_s": "5", "target.headers.authorization": "Bearer x", "mix.0.weight": 2, "mix.b.weight": 3,
            "mix.*.steps": {7: 1}, "slo.latency_ms": 100, "slos.a.latency_ms": 5, "thresholds": ["p99_ms < 1"],
        },
    )  # fmt: skip
    assert scenario.duration_s == 5
    assert scenario.target.headers == {"authorization": "Bearer x"}
    assert [(spec.weight, spec.steps) for spec in scenario.mix] == [(2, {7: 1}), (3, {7: 1})]
    assert (scenario.slo.latency_ms, scenario.slos["a"].latency_ms, scenario.thresholds) == (100, 5, ("p99_ms < 1",))


def test_weights_have_a_short_form():
    """One value is drawn always, a list is drawn alike."""
    spec = load_scenario({}, {"mix.*.steps": 10, "mix.*.images": [1, 4], "mix.*.size": "64x64"}).mix[0]
    assert (spec.steps, spec.images, spec.size) == ({10: 1}, {1: 1, 4: 1}, {"64x64": 1})


def test_another_kind_of_arrivals_keeps_the_rate():
    """What both kinds have stays, whatever the order of the flags; what only the old one had goes."""
    gamma = {"arrivals": {"kind": "gamma", "rate_per_s": 7, "burstiness": 0.5}}
    assert load_scenario(gamma, {"arrivals.kind": "poisson"}).arrivals == PoissonArrivals(rate_per_s=7)
    assert load_scenario(gamma, {"arrivals.kind": "gamma"}).arrivals == GammaArrivals(rate_per_s=7, burstiness=0.5)
    ramp = load_scenario(gamma, {"arrivals.to_rate_per_s": 9, "arrivals.kind": "ramp"}).arrivals
    assert ramp == RampArrivals(rate_per_s=7, to_rate_per_s=9)
    assert "arrivals.concurrency must be given" in refused(gamma, {"arrivals.kind": "closed"})


def test_paths_of_a_file_are_relative_to_it(tmp_path, monkeypatch):
    """A scenario works from every folder; paths of flags are relative to the current one."""
    folder = tmp_path / "scenarios"
    folder.mkdir()
    (folder / "p.txt").write_text("prompt\n")
    (folder / "c.png").write_bytes(b"png")
    (tmp_path / "t.csv").write_text("at\n1\n")
    (folder / "mine.yaml").write_text(
        "mix: [{prompts_file: p.txt, controlnets: {images: [c.png], names: [e], count: {1: 1}}}]\n"
        "arrivals: {kind: trace, file: ../t.csv, column: at}\n"
    )
    monkeypatch.chdir(tmp_path)
    scenario = load_scenario("scenarios/mine.yaml", {})
    assert scenario.name == "mine"
    assert scenario.mix[0].prompts_file.samefile(folder / "p.txt")
    assert scenario.mix[0].controlnets.images[0].samefile(folder / "c.png")
    assert scenario.arrivals.file.samefile(tmp_path / "t.csv")
    given = load_scenario(Path("scenarios/mine.yaml"), {"arrivals.file": "scenarios/../t.csv"})
    assert isinstance(given.arrivals, TraceArrivals)
    monkeypatch.chdir(folder)
    assert load_scenario(yaml.safe_load(as_yaml(scenario)), {}) == scenario


STEPS = {"kind": "step", "stages": [[60, 5], [60, 10]]}


def test_stages_decide_how_long_a_run_is():
    """Without a duration all of them are run; the last lasts to the end of a longer one, or until a count."""
    assert load_scenario({"arrivals": STEPS}, {}).duration_s == 120
    assert load_scenario({"arrivals": STEPS, "duration_s": 200}, {}).duration_s == 200
    assert load_scenario({"arrivals": STEPS, "count": 10, "duration_s": 5}, {}).count == 10
    assert load_scenario({}, {"arrivals.kind": "step", "arrivals.stages": [[7, 5]]}).duration_s == 7


INFER = {"target": {"api": "infer", "model": "m"}}
RAW = {"target": {"api": "raw"}}


@pytest.mark.parametrize(
    ("source", "overrides", "says"),
    [
        # unknown, missing, of a wrong type
        ({"durations_s": 3}, {}, r"^durations_s: there is no such setting \(did you mean duration_s\?\)$"),
        ({"duration_s": "x", "durations_s": 3}, {}, "^durations_s: there is no such setting"),
        ({}, {"target.ulr": 3}, r"^target.ulr: there is no such setting \(did you mean url\?\)$"),
        ({}, {"mix.0.stepz": 3}, r"^mix.0.stepz: there is no such setting \(did you mean steps\?\)$"),
        # ... where it belongs elsewhere: there, whatever is near it here
        ({}, {"limits.timeout_s": 3}, r"^limits.timeout_s: there is no .* \(did you mean target.timeout_s\?\)$"),
        ({}, {"limits.connect_timeout_s": 3}, r"\(did you mean target.connect_timeout_s\?\)$"),
        ({"drain_s": 3}, {}, r"^drain_s: there is no such setting \(did you mean limits.drain_s\?\)$"),
        ({"target": {"seed": 3}}, {}, r"^target.seed: there is no such setting \(did you mean seed\?\)$"),
        ({"steps": 3}, {}, r"^steps: there is no such setting \(did you mean mix.\*.steps\?\)$"),
        ({}, {"mix.0.loras.nam": 3}, r"^mix.0.loras.nam: there is no such setting \(did you mean names\?\)$"),
        (RAW, {"mix.0.steps": 3}, "^mix.0.steps: there is no such setting$"),
        ({}, {"arrivals.burstiness": 3}, r"^arrivals.burstiness: there is no such setting for poisson arrivals, which"),
        ({"duration_s": 4}, {"duration_s.x": 3}, "^duration_s.x: duration_s has no settings of its own$"),
        ({}, {"mix.3.weight": 1}, "^mix.3: there is no such entry; use a position from 0, a name, or"),
        ({"seed": 4}, {"seed.a.b": 1}, "^seed.a: there is no such setting$"),
        ({}, {"duration_s": float("nan")}, "^duration_s: must be a finite number"),
        ({}, {"duration_s": 1e8}, "^duration_s: must be less than or equal to 10000000, not 1"),
        ({}, {"arrivals.kind": "fast"}, "^arrivals.kind: one of 'constant', 'poisson', .*, not 'fast'$"),
        ({"arrivals": {"rate_per_s": 3}}, {}, "^arrivals.kind must be given$"),
        ({}, {"arrivals.kind": "ramp"}, "^arrivals.to_rate_per_s must be given$"),
        ({"mix": [{"api": "grpc"}]}, {}, "^mix.0.api: one of 'images', 'infer', 'raw', not 'grpc'$"),
        # the target
        ({}, {"target.url": "localhost:8000"}, "^target.url: 'localhost:8000' is not http"),
        ({}, {"target.url": "http://a:b"}, "^target.url: 'http://a:b' is not a URL"),
        ({}, {"target.url": "http://a/v1"}, "^target.url: 'http://a/v1' goes on after host and port"),
        ({}, {"target.url": "http://a?q"}, "^target.url: 'http://a\\?q' goes on after host and port"),
        ({}, {"target.url": "http://"}, "^target.url: 'http://' is not http"),
        ({}, {"target.url": "http://u:p@a"}, "^target.url: has a user name"),
        ({}, {"target.path": "v1"}, "^target.path: 'v1' does not start with /$"),
        ({}, {"target.path": "/a b"}, "^target.path: '/a b' has characters that must be percent-encoded$"),
        ({}, {"target.headers": {"x": "a\r\nb: c"}}, "^target.headers.x: is not printable ASCII text$"),
        ({}, {"target.headers": {"x y": "a"}}, "^target.headers: bad name 'x y'$"),
        # arrivals
        ({}, {"arrivals.rate_per_s": 1e9}, "^arrivals: some 3e"),
        ({}, {"arrivals": {"kind": "step", "stages": [[1, 5], [0, 5]]}}, "^arrivals.stages.1.0: must be"),
        ({}, {"arrivals": {"kind": "step", "stages": [[1, 0]]}}, "^arrivals.stages: never has a rate above 0$"),
        ({}, {"arrivals": STEPS, "duration_s": 100}, "^arrivals.stages: last 120 s, longer than duration_s, 100"),
        ({}, {"arrivals": {"kind": "trace", "file": "/no", "column": "a"}}, "^arrivals.file: there is no file"),
        ({}, {"arrivals": {"kind": "gamma", "rate_per_s": 1, "burstiness": 1e-9}}, "^arrivals.burstiness: must be"),
        ({}, {"arrivals": {"kind": "closed", "concurrency": 2000}}, "^arrivals.concurrency: 2000 are more than"),
        ({"needs": ["mix.0.steps", "mix.1.steps"], "mix": [{"steps": 1}]}, {}, "^mix.1.steps must be given"),
        # the mix
        ({"mix": []}, {}, "^mix: has no class of requests$"),
        ({"mix": [{}, {}]}, {}, "^mix.0.name: 'images' is the name of another class too$"),
        ({"mix": [{"api": "raw"}]}, {}, "^mix.0.api: is raw, but target.api is images$"),
        ({}, {"mix.0.steps": {0: 1}}, "^mix.0.steps.0: must be greater than or equal to 1, not"),
        ({}, {"mix.0.steps": {4: 0}}, "^mix.0.steps: has no weight above 0$"),
        ({}, {"mix.0.steps": {4: -1}}, "^mix.0.steps.4: must be greater than or equal to 0"),
        ({}, {"mix.0.steps": {1: 1e308, 2: 1e308}}, "^mix.0.steps: has weights whose sum is too large"),
        ({}, {"mix.0.size": "big"}, "^mix.0.size: 'big' is not WIDTHxHEIGHT$"),
        ({}, {"mix.0.prompts": []}, "^mix.0.prompts: is empty$"),
        ({}, {"mix.0.prompts_file": "~nobody-here/x"}, "^mix.0.prompts_file: there is no file /.*/~nobody-here/x$"),
        ({}, {"mix.0.extra": {"prompt": "x"}}, "^mix.0.extra: prompt is written by the generator itself$"),
        ({}, {"mix.0.loras.count": {1: 1}}, "^mix.0.loras.names: 0 are too few for the 1 that a request may carry$"),
        ({}, {"mix.0.loras": {"names": ["a"], "popularity": {"a": 1}}}, "^mix.0.loras.popularity: is given beside"),
        ({}, {"mix.0.loras.names": ["a", "a"]}, "^mix.0.loras.names: has the same name twice$"),
        ({}, {"mix.0.loras.names": ["../a"]}, "^mix.0.loras.names.0: string should match pattern"),
        ({}, {"mix.0.controlnets": {"count": 4, "names": [*"abcd"]}}, "^mix.0.controlnets.count: 4 is more than 3$"),
        (INFER, {"target.model": None}, "^target.model: must be given"),
        (INFER, {"mix.0.candidates": 0}, "^mix.0.candidates.0: must be greater than or equal to 1, not"),
        (INFER, {"mix.0.rows": [4, 0]}, "^mix.0.rows.1: must be greater than or equal to 1, not 0$"),
        (INFER, {"mix.0.ids_per_table": [4, 1]}, "^mix.0.ids_per_table: has 2 entries for 1 tables$"),
        (INFER, {"mix.0.ids_per_table": [0]}, "^mix.0.ids_per_table.0: must be greater than or equal to 1, not 0$"),
        (INFER, {"mix.0.rows": [], "mix.0.dense": 0}, "^mix.0.rows: is empty, and so is dense"),
        (INFER, {"mix.0.inputs": [{"name": "a", "ids": 3, "numbers": 2}]}, "^mix.0.inputs.0: has numbers or ids"),
        (INFER, {"mix.0.inputs": [{"name": "a", "numbers": 2, "bag": 2}]}, "^mix.0.inputs.0.bag: belongs to ids$"),
        (RAW, {"mix.0.content_type": "a\nb"}, "^mix.0.content_type: is not printable text$"),
        (RAW, {"mix.0.body": "y", "mix.0.body_file": __file__}, "^mix.0.body_file: is given beside body"),
        # half a character, as in YAML's "\ud800", and bytes of a command line that are no UTF-8
        ({"mix": [{"prompts": ["a", "\ud800"]}]}, {}, "^mix.0.prompts.1: is not valid Unicode$"),
        (RAW, {"mix.0.body": "\udcff"}, "^mix.0.body: is not valid Unicode$"),
        ({}, {"slos": {"\ud800": {"latency_ms": 5}}}, "^slos: is not valid Unicode$"),
        # what belongs together
        ({}, {"slos.b.latency_ms": 5}, "^slos.b: is no class of the mix, which has images$"),
        ({}, {"processes": 4, "limits.connections": 3}, "^limits.connections: 3 are fewer than 4 processes$"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_a_sentence(source, overrides, says):
    """Every rule has its sentence, and it begins with the field."""
    message = refused(source, overrides)
    assert re.search(says, message), message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "line 1: "),
        ("seed: 1\nseed: 2\n", "line 2: 'seed' is given twice"),
        ("- 1\n", "a scenario is a mapping of settings"),
        ("seed: !!python/object:os.system {}\n", "line 1: could not determine a constructor"),
        ("duration_s: 0\n", "duration_s: must be greater than 0"),
        ("\x00", "unacceptable character"),
        ("[" * 1100, "is nested too deeply"),
        ("name: 2024-99-99", "month must be in 1..12"),
        ("name: !!bool maybe", "a value is not what its tag says"),
        ("? [a, {b: 1}]\n: 1\n", "line 1: found unhashable key"),
    ],
)
def test_what_is_wrong_in_a_file_begins_with_its_name(tmp_path, text, says):
    """Not YAML, a key twice, no mapping: file and line are in the sentence."""
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path, {})
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)


def test_a_name_that_is_nothing_is_told_what_there_is(tmp_path):
    """Built-in names are listed; a missing file and a folder are named."""
    message = refused("smokey")
    assert message.startswith("'smokey' is neither a scenario of plait (capacity, ")
    assert "no such file" in refused(str(tmp_path / "x.yaml")).lower()
    assert "cannot be read" in refused(tmp_path)


def test_yaml_may_share_settings(tmp_path):
    """Anchors and merge keys work, one on top of the other too, and are no key given twice."""
    path = tmp_path / "s.yaml"
    path.write_text(
        "mix:\n"
        "  - &a {name: a, steps: 5, weight: 2, loras: &l {scale: 1, names: [x]}}\n"
        "  - &b {<<: *a, name: b, weight: 1, loras: &m {<<: *l, scale: 2}}\n"
        "  - {<<: *b, name: c, loras: {<<: *m}}\n"
        "slos: {c: {latency_ms: 3}}\n"
    )
    mix = load_scenario(path, {}).mix
    assert [(spec.name, spec.weight, spec.loras.scale) for spec in mix] == [("a", 2, 1), ("b", 1, 2), ("c", 1, 2)]
    assert all(spec.steps == {5: 1} and spec.loras.names == ("x",) for spec in mix)


def test_every_setting_that_names_files_is_known():
    """Whoever refuses files of strangers asks `path_settings`; a new setting of the kind must be in it."""
    models = [one for one in vars(scenario_module).values() if isinstance(one, type) and issubclass(one, BaseModel)]
    named = {field for model in models for field, info in model.model_fields.items() if "Path" in str(info.annotation)}
    everything = {
        "arrivals": {"file": "a"},
        "target": {"ca": "a"},
        "mix": [
            {
                "prompts_file": "a", "body_file": "a", "controlnets": {"images": ["a"]},
                "edits": {"images": ["b"], "masks": ["b"]},
            }
        ],
    }  # fmt: skip
    found = list(path_settings(everything))
    assert {key for _, key in found} == named
    assert len(found) == 7
