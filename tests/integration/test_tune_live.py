"""Tuning for real: a clone on a Ray of its own, and a live server that is guarded and rolled back."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.tuned_app import COMPOSE, TARGET, write_job
from plait.tuning.job import local_run as work
from plait.tuning.measure import live
from plait.tuning.measure.live import left_notes, note_path
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.values import FailureKind
from support.server import REPOSITORY, PlaitServer, free_port

pytestmark = pytest.mark.cluster

ARGUMENTS = {"compose": COMPOSE}
KNOBS = {
    "batch": {"kind": "choice", "values": [8], "sets": "engine.largest_batch"},
    "wait": {"kind": "choice", "values": [0.0, 5000.0], "sets": "engine.batch_wait_ms"},
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder, for this process and all that it starts."""
    root = tmp_path_factory.mktemp("tune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIT_STATE_DIR", str(root / "state"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]))
        yield root


@pytest.fixture(scope="module")
def server(environment: Path) -> Iterator[PlaitServer]:
    """A server that people might be on."""
    port = free_port()
    started = PlaitServer.launch(("fakes.tuned_app",), [str(port)], port=port, root=environment)
    try:
        yield started.wait_ready()
    finally:
        assert started.stop() == 0


def knobs_in_force(server: PlaitServer) -> tuple[str, str]:
    """Batch and wait that the engine was given last."""
    return re.findall(r"knobs: threads=\d+ batch=(\d+) wait=([\d.]+)", server.log())[-1]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a short name, as the sockets in it need."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow  # a minute: it starts a Ray of its own and measures a trial
@pytest.mark.usefixtures("environment")
def test_a_job_measures_a_clone_on_its_own_ray_and_leaves_nothing(tmp_path, temporary, monkeypatch):
    """Knobs reach the running replicas without a restart, a trial has all of its metrics, and no process is left. Where
    users go past Serve's proxy it does too, at a port of the clone's own."""
    monkeypatch.setenv("PLAIT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        taken = theirs.getsockname()[1]
        target = {"app": "images", "settings": {**TARGET["settings"], "server.direct_port": taken}}
        job = write_job(tmp_path, limits=["quality_drift <= 0.01"], target=target, budget={"trials": 1})
        state, folder = work.run(job, folder=tmp_path / "job", arguments=ARGUMENTS)
    assert state.phase == "finished", state.reason
    assert state.subject.costs == ()
    assert list(temporary.glob("pymp-*")) == []
    assert 1.4 * len(state.rows) < state.remaining.load_s < state.remaining.used_s  # loads of 1.5 s
    (row,) = [row for row in state.rows if row.kind is MeasurementKind.TRIAL]
    assert row.restarted == ()
    assert "engine reconfigured" in row.note
    assert row.outcome.failure is None
    assert row.outcome.metrics["quality_drift"] == 0.0
    cores, cost = 0.1 + 0.4, row.outcome.metrics["cost_per_hour"]  # what Ray reserves, whatever the threads
    assert cost == pytest.approx(0.04 * cores + 0.005 * row.outcome.metrics["memory_gib"])
    assert row.samples.memory_bytes > 50 << 20
    assert (port := re.search(r"answering on (127\.0\.0\.1:\d+)", (folder / "clone.log").read_text()))
    assert f"http://{port[1]}" in (folder / "trials" / f"{row.number:04d}" / row.artefacts[0]).read_text()
    assert not port[1].endswith(f":{taken}")
    assert (folder / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "state").glob("port-*/run.json")) == []


def test_a_live_server_is_guarded_and_gets_its_own_configuration_back(server: PlaitServer, tmp_path: Path) -> None:
    """A trial that hurts is broken off and rolled back, no replica is restarted, the original is there at the end."""
    pids = server.replica_pids("engine")
    live = {"guard": ["p95_ms <= 4000", "error_rate <= 0.2"], "check_every_s": 0.25, "leave": "original"}
    target = {"app": "images", "settings": {"server.port": server.port}, "live": live}
    reference = {"config": {"batch": 8, "wait": 0.0}, "every": 0}
    job = write_job(tmp_path, target=target, knobs=KNOBS, reference=reference, budget={"trials": 1})
    state, _ = work.run(job, folder=tmp_path / "job", live=True, arguments=ARGUMENTS)
    hurt = state.rows[-1].outcome
    assert hurt.failure is FailureKind.TIME_OUT
    assert "guard" in hurt.detail
    assert "wait=5000.0" in server.log()
    assert knobs_in_force(server) == ("16", "0.0")
    assert server.replica_pids("engine") == pids
    assert server.generate(prompt="x")[0] == 200


def test_a_server_is_given_knobs_and_what_a_killed_tuner_left_is_rolled_back(server, environment, monkeypatch):
    """Knobs are told, take effect without a restart, and are from then on the server's own configuration. This is on
    disk before a tuner's first change, so the next tuner finds it and restores it."""
    root, pids = environment / "state", server.replica_pids("engine")
    note = note_path(root, server.port)
    code = (  # a process of its own: one can set the environment of Ray only once
        "import os, signal; from pathlib import Path\n"
        "from plait.tuning.job.applying import apply_to_server; from plait.tuning.measure import application\n"
        "from plait.tuning.measure.knobs import apply_knobs; from plait.tuning.measure.live import LiveServer\n"
        "from fakes.tuned_app import compose; application.deployments = compose\n"
        f"for batch in (6, 16): print(apply_to_server({{'engine.largest_batch': batch}}, port={server.port}, "
        "dry_run=False), end='', flush=True)\n"
        f"assert not Path({str(note)!r}).exists()\n"
        f"live = LiveServer(compose, root=Path({str(root)!r}), port={server.port})\n"
        "live.apply(apply_knobs(live.original, {'engine.largest_batch': 5}), limit_s=60)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "engine.largest_batch: 16 -> 6\nengine.largest_batch: 6 -> 16\n"
    assert re.findall(r"knobs: threads=\d+ batch=(\d+)", server.log())[-3:] == ["6", "16", "5"]
    assert left_notes(root) == [server.port]
    said: list[str] = []
    run = subprocess.run
    monkeypatch.setattr(live.subprocess, "run", lambda command, **how: run([*command, COMPOSE], **how))
    live.recover_all(root, say=said.append)
    assert "has its own configuration again" in said[-1]
    assert knobs_in_force(server) == ("16", "0.0")
    assert not note.exists()
    assert server.replica_pids("engine") == pids
