"""The benchmark of other libraries' models reads what its child process says."""

from __future__ import annotations

import json

from plait_bench import zoo


def test_rows_of_a_variant_and_of_a_refusal(monkeypatch, tmp_path):
    """A packaged variant has bytes, seconds and a difference; a refused one is counted, and its reason is said."""
    lines = [
        {"variant": "a", "crossing_bytes": 640, "package_s": 0.5, "millionths": 0.1},
        {"variant": "b", "refused": "aten.x.default: why"},
    ]
    monkeypatch.setattr(zoo, "run_command", lambda *_, **__: "\n".join(map(json.dumps, lines)) + "\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    workload = zoo.benchmark()[0]
    with workload.session(said.append), workload.open("plait", "") as subject:
        readings = {(one.workload, one.metric): one.value for one in subject.measure(0)}
    assert readings == {
        ("a", "crossing_bytes"): 640.0,
        ("a", "package_s"): 0.5,
        ("a", "millionths"): 0.1,
        ("a", "refused"): 0.0,
        ("b", "refused"): 1.0,
    }
    assert any("aten.x.default: why" in line for line in said)
