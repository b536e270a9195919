"""Tuning jobs survive what happens to the processes around them: the desk's actor, the job's own process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from starlette.testclient import TestClient

from fakes.tuning_desk import Threads
from plait.config import TuningSection
from plait.tuning.service.job_process import start_job
from plait.tuning.service.job_queue import JobQueueSettings
from plait.tuning.service.job_view import JobQueueError
from plait_autoconfig.jobs.reporting import read_state
from plait_autoconfig.jobs.store import JobStore
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from support.tune_jobs import fake_source, job, job_text
from support.waiting import wait_for

TRIALS = {"budget": {"trials": 4}, "confirm": {"best": 1, "times": 1}}


def finished(store):
    """How many measurements are over."""
    return [record.number for record in store.records() if record.status == "finished"]


def test_a_job_process_ends_with_whoever_started_it_and_goes_on_later(tmp_path):
    """When its standard input closes it stops in good order; the next one measures nothing again."""
    store = JobStore.open_or_create(tmp_path, job(**TRIALS))
    slow = start_job(tmp_path, fake_source(seconds=0.5))
    wait_for(lambda: finished(store))
    slow.stdin.close()
    wait_for(lambda: slow.poll() is not None)
    before = finished(store)
    assert read_state(store).phase == "waiting"
    assert (tmp_path / "progress.json").is_file()
    with start_job(tmp_path, fake_source()) as quick:
        wait_for(lambda: quick.poll() is not None)
    assert quick.returncode == 0
    state = read_state(store)
    assert state.phase == "finished"
    assert finished(store)[: len(before)] == before
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.cluster
async def test_the_actor_survives_its_clients_and_its_own_death(tmp_path, shared_serve):  # its Ray
    """Another client finds the same desk; after kill -9 of the actor in the middle of a job the job is finished."""
    import ray

    from plait.tuning.service.actor import ActorTuningService

    settings, start, others = JobQueueSettings(folder=tmp_path / "jobs", config=""), Threads(seconds=0.2), _tuners()
    job_id = (await ActorTuningService(lambda: settings, start=start).submit(job_text(**TRIALS), "ops"))["id"]
    service = ActorTuningService(lambda: settings, start=start)
    while not (await service.call("since", job_id, 0))["measured"]:  # noqa: ASYNC110  # it is another process
        await asyncio.sleep(0.1)
    with pytest.raises(JobQueueError, match="there is no tuning job"):
        await service.call("job", "absent")
    (actor,) = _tuners() - others
    os.kill(await ray.get_actor(*actor).__ray_call__.remote(_pid), signal.SIGKILL)
    while (await service.call("job", job_id))["status"] != "finished":  # noqa: ASYNC110  # it is another process
        await asyncio.sleep(0.1)
    rows = (await service.call("job", job_id))["state"]["rows"]
    assert [row["number"] for row in rows] == list(range(len(rows)))
    assert sum(row["kind"] == "trial" and row["status"] == "finished" for row in rows) == 4
    _check_routes(tmp_path / "jobs", job_id)
    ray.kill(ray.get_actor(*actor))


def _check_routes(folder, job_id):
    """What `plait serve` adds to its ingress reaches the same desk, and its errors come back as they are."""
    from plait.tuning.service.http import tuning_routers

    routers = tuning_routers({"config": {}}, tuning=TuningSection(enabled=True, folder=folder))
    client = TestClient(create_app(None, HttpSettings(), routers=routers))
    assert [each["id"] for each in client.get("/v1/tuning/jobs").json()["data"]] == [job_id]
    answer = client.post("/v1/tuning/jobs", content="[]", headers={"content-type": "application/yaml"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_job")


def _tuners() -> set[tuple[str, str]]:
    """Names and namespaces of the tuning actors in this Ray."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    return {(each["name"], each["namespace"]) for each in named if each["name"].startswith("plait-tuning-")}


def _pid(_actor):
    return os.getpid()
