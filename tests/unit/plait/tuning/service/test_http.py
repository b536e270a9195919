"""Tuning jobs over HTTP: the routes, the desk that keeps the jobs, and the stream of events."""

from __future__ import annotations

import errno
import json
import threading
from contextlib import contextmanager

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from fakes.tuning_desk import CONFIG, LocalTuningService, Threads, desk_in
from plait.config import ServedConfig, ServerSection, TuningSection
from plait.tuning.service.http import MAX_JOB_BYTES, tuning_router
from plait.tuning.service.job_queue import MAX_DEATHS, JobQueueSettings
from plait_autoconfig.jobs.store import JobStore
from plait_report.page import POLICY
from plait_serving.deployments.ingress import Ingress
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.sections import Role
from support.keys import api_key
from support.tune_jobs import JOB, job_text
from support.waiting import wait_for

KEYS = (
    api_key("boss", tenant="ops", role=Role.ADMIN),
    api_key("guest", tenant="shop", role=Role.USER),
)
BOSS = {"authorization": "Bearer boss"}
YAML = {**BOSS, "content-type": "application/yaml"}
URL = "/v1/tuning/jobs"
SHORT = job_text(budget={"trials": 2}, confirm={"best": 1, "times": 1})
KINDS = ["reference", "trial", "trial", "confirm", "confirm", "check", "check", "check"]


def client_of(desk):
    """A client of a server with these jobs and nothing else."""
    router = tuning_router(LocalTuningService(desk), poll_s=0.01)
    app = create_app(None, HttpSettings(api_keys=KEYS), routers=(router,))
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def desk(tmp_path):
    """A desk that works only when it is told to."""
    return desk_in(tmp_path / "jobs", Threads())


@pytest.fixture
def client(desk):
    """See `client_of`."""
    return client_of(desk)


@contextmanager
def at_work(desk):
    """The desk works in a thread meanwhile."""
    done = threading.Event()

    def work():
        while not done.is_set():
            if not desk.work_once():
                done.wait(0.01)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def posted(client, text=SHORT, headers=YAML):
    """The answer to a new job."""
    return client.post(URL, content=text, headers=headers)


def started(client, text=SHORT):
    """The id of a new job."""
    answer = posted(client, text)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def error_of(answer):
    """The error in the form of the house."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]


# ---- a job's life ----------------------------------------------------------------------------------------------------


def test_a_job_is_taken_worked_on_and_told(desk, client):
    """202 with its address, then queued, then finished with a recommendation by the names that plait.yaml knows. There
    is a report all the time, with a policy of its own."""
    answer = posted(client)
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"{URL}/{job['id']}"
    assert (job["object"], job["status"], job["tenant"]) == ("tuning.job", "queued", "ops")
    assert "Not begun" in client.get(f"{URL}/{job['id']}/report", headers=BOSS).text
    assert desk.work_once()
    found = client.get(f"{URL}/{job['id']}", headers=BOSS).json()
    assert found["status"] == "finished"
    assert found["trials"] == {"done": 2, "budget": 2}
    assert set(found["recommended"][0]["knobs"]) == {"engine.replicas", "engine.largest_batch"}
    assert [row["kind"] for row in found["state"]["rows"]] == KINDS
    listed = client.get(URL, headers=BOSS).json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == [job["id"]]
    assert "state" not in listed["data"][0]
    page = client.get(f"{URL}/{job['id']}/report", headers=BOSS)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith(POLICY)
    assert "All measurements" in page.text


def test_a_job_keeps_tuning_the_server_that_it_was_sent_to(tmp_path, desk, client):
    """Stored with the server's configuration and the desk's library to learn from. Measurements of two configurations
    are not compared: one that is changed is that of the next jobs."""
    first, changed = started(client), CONFIG.replace("threads: 1", "threads: 2")
    desk.configure(JobQueueSettings(folder=tmp_path / "jobs", config=changed))
    for job_id, config in ((first, CONFIG), (started(client), changed)):
        store = JobStore.open(tmp_path / "jobs" / job_id)
        path = store.folder / "server.yaml"
        assert (store.spec.target.config, path.read_text()) == (str(path), config)
        assert store.spec.library == str(tmp_path / "jobs" / "library.journal")


# ---- events ----------------------------------------------------------------------------------------------------------


def events_of(text):
    """(event, id, data) of a stream."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("event"), fields.get("id"), json.loads(fields["data"])))
    return found


def test_events_tell_every_measurement_once_and_then_the_end(desk, client):
    """In order, numbered from 1; the stream ends with the job."""
    job_id = started(client)
    with at_work(desk):
        answer = client.get(f"{URL}/{job_id}/events", headers=BOSS)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events_of(answer.text)
    measured = [(number, data["number"]) for name, number, data in found if name == "tuning_job.measured"]
    assert measured == [(str(n + 1), n) for n in range(len(KINDS))]
    assert found[0][0] == "tuning_job.updated"
    assert (found[-1][0], found[-1][2]["status"]) == ("tuning_job.ended", "finished")


def test_a_client_that_comes_back_gets_what_it_missed(desk, client):
    """``last-event-id`` is where it goes on; one that is not ours is as good as none."""
    job_id = started(client)
    desk.work_once()
    for known, first in (("3", "4"), ("x", "1"), (str(len(KINDS)), None)):
        text = client.get(f"{URL}/{job_id}/events", headers={**BOSS, "last-event-id": known}).text
        measured = [number for name, number, _ in events_of(text) if name == "tuning_job.measured"]
        assert (measured or [None])[0] == first
        assert events_of(text)[-1][0] == "tuning_job.ended"


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled_at_once(desk, client):
    """It never starts; cancelling it again is a conflict."""
    job_id = started(client)
    assert client.post(f"{URL}/{job_id}/cancel", headers=BOSS).json()["status"] == "cancelled"
    assert not desk.work_once()
    answer = client.post(f"{URL}/{job_id}/cancel", headers=BOSS)
    assert error_of(answer) == (409, "job_is_over", None)
    assert answer.headers["x-should-retry"] == "false"


def test_a_running_job_is_broken_off(tmp_path):
    """What it is measuring is given up, and the next job begins."""
    desk = desk_in(tmp_path / "jobs", Threads(seconds=0.3))
    client = client_of(desk)
    job_id, other = started(client, job_text(budget={"trials": 100})), started(client)
    with at_work(desk):
        wait_for(lambda: client.get(f"{URL}/{job_id}", headers=BOSS).json()["state"]["rows"])
        assert client.post(f"{URL}/{job_id}/cancel", headers=BOSS).status_code == 200
        wait_for(lambda: client.get(f"{URL}/{job_id}", headers=BOSS).json()["status"] == "cancelled")
        client.post(f"{URL}/{other}/cancel", headers=BOSS)
        wait_for(lambda: client.get(f"{URL}/{other}", headers=BOSS).json()["status"] == "cancelled")


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_only_admins_may_tune(client):
    """No key: 401; a user's key: 403, on every route, before the body is looked at."""
    job_id = started(client)
    for method, path in (
        ("POST", URL), ("GET", URL), ("GET", f"{URL}/{job_id}"), ("POST", f"{URL}/{job_id}/cancel"),
        ("GET", f"{URL}/{job_id}/events"), ("GET", f"{URL}/{job_id}/report"),
    ):  # fmt: skip
        assert client.request(method, path).status_code == 401
        answer = client.request(method, path, headers={"authorization": "Bearer guest"})
        assert error_of(answer)[:2] == (403, "admin_required")


def test_the_documents_first_job_is_one(client):
    """Interactive documentation shows it, to be sent as it is, in JSON. The newest job is listed first."""
    first = started(client)
    document = client.get("/openapi.json", headers=BOSS).json()
    job = document["paths"][URL]["post"]["requestBody"]["content"]["application/json"]["example"]
    headers = {**BOSS, "content-type": "application/json; charset=utf-8"}
    second = posted(client, json.dumps(job), headers).json()["id"]
    assert [each["id"] for each in client.get(URL, headers=BOSS).json()["data"]] == [second, first]


def test_an_unknown_job_is_not_found(client):
    """Whatever is asked of it, and however long its name."""
    for path in ("absent", "absent/report", "absent/events", "a" * 500):
        assert error_of(client.get(f"{URL}/{path}", headers=BOSS)) == (404, "job_not_found", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: [", "line 1"),
        ("name: 2026-99-99", "month must be in 1..12"),
        ("", "a job is a mapping"),
        ("[" * 5000, "nested more than"),
        (job_text(knobs={}), "knobs"),
        (job_text(constraints=["replicas * batch <= 0"]), "the space is empty"),
        ("a: &a [x]\nb: *a\n", "anchors"),
    ],
)
def test_a_bad_job_is_refused_with_a_sentence(client, text, says):
    """400 in the form of the house; nothing is stored."""
    answer = posted(client, text)
    assert error_of(answer)[:2] == (400, "invalid_job")
    assert says in answer.json()["error"]["message"]
    assert client.get(URL, headers=BOSS).json()["data"] == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"target": {"config": "/etc/passwd"}}, "target.config"),
        ({"target": {"command": ["rm"], "ready": "http://127.0.0.1/"}}, "target.command"),
        ({"target": {"apply": ["rm"], "url": "http://127.0.0.1/"}}, "target.apply"),
        ({"target": {"app": "images", "apply": []}}, "target.apply"),
        ({"library": "x.journal"}, "library"),
        ({"storage": "sqlite:///x.db"}, "storage"),
        ({"target": {"live": {"guard": ["p99_ms <= 9"]}}}, "target.live"),
        *(
            ({"target": {"settings": {path: value}}}, "target.settings")
            for path, value in {
                "ray.address": "ray://10.0.0.1:10001",
                "server.host": "0.0.0.0",
                "server.port": 80,
                "images": {"model": "/etc"},
                "images.model": "/etc",
                "images.loras": {"folder": "/etc"},
                "images.loras.folder": "/etc",
                "images.controlnets": {"x": {"folder": "/etc"}},
                "images.controlnets.x.folder": "/etc",
                "images.knobs.threads.x/../y": 1,
                "recommend.models": {"x": {"folder": "/etc"}},
                "recommend.models.x.folder": "/etc",
                "recommend.models.x.cn.folder": "/etc",
                "recommend.models.x.cn.y": {"folder": "/etc"},
                "tuning.enabled": True,
                "tuning.folder": "/etc",
            }.items()
        ),
        *(
            ({"scenarios": [scenario | changed]}, f"scenarios.0.{param}")
            for scenario in JOB["scenarios"]
            for changed, param in (
                ({"arrivals": {"kind": "trace", "file": "/etc/passwd", "column": "x"}}, "file"),
                ({"mix": [{"body_file": "/etc/passwd"}]}, "body_file"),
                ({"mix": [{}, {"api": "images", "prompts_file": "/etc/passwd"}]}, "prompts_file"),
                ({"mix": [{"api": "images", "controlnets": {"images": ["/etc/passwd"]}}]}, "images"),
                ({"target": {"url": "http://169.254.169.254", "api": "raw"}}, "target.url"),
            )
        ),
    ],
)
def test_a_job_names_no_files_and_no_addresses_and_leaves_users_alone(client, changes, param):
    """The client has no files here and no business elsewhere; tuning the live application is a decision of the server's
    owner (finding 7)."""
    assert error_of(posted(client, job_text(**changes))) == (400, "invalid_job", param)


@pytest.mark.parametrize(
    "settings",
    [
        {"images.knobs.largest_batch": 4, "images.replicas": 1, "images.defaults.steps": 4, "recommend": None},
        {"images.controlnets": {}, "images.num_cpus": 1.5},
        {"images": None, "recommend.models.picks.mode": "whole", "recommend.models.picks.whole.knobs.threads": 1},
    ],
)
def test_a_job_sets_what_is_harmless(client, settings):
    """Knobs, replicas, cores, defaults; and what is not served at all."""
    started(client, job_text(target={"settings": settings}))


def test_a_scenario_file_is_refused_before_it_is_read(client, tmp_path):
    """By its place in the list, whether or not the file exists."""
    (tmp_path / "load.yaml").write_text("secret: 1\n")
    for path in (str(tmp_path / "load.yaml"), "/absent.yaml"):
        answer = posted(client, job_text(scenarios=[path]))
        assert error_of(answer) == (400, "invalid_job", "scenarios.0")
        assert "secret" not in answer.text


def test_a_live_job_runs_where_the_server_allows_it(tmp_path):
    """And only a job that says so itself is told that it may."""
    runner = Threads()
    desk = desk_in(tmp_path / "jobs", runner, live=True)
    client = client_of(desk)
    live = started(client, job_text(budget={"trials": 1}, target={"live": {"guard": ["p99_ms <= 999"]}}))
    plain = started(client)
    assert desk.work_once()
    assert desk.work_once()
    assert runner.started == [(live, True), (plain, False)]


def test_bodies_of_other_kinds_are_refused(client):
    """A type that a foreign web page could send, one too large, one that is no text."""
    assert error_of(posted(client, headers={**BOSS, "content-type": "text/plain"}))[0] == 415
    assert error_of(posted(client, "#" * (MAX_JOB_BYTES + 1)))[:2] == (413, "body_too_large")
    assert error_of(posted(client, b"\xff\xfe"))[:2] == (400, "invalid_job")


def test_a_queue_has_an_end(client, monkeypatch):
    """429 with a time to come back."""
    monkeypatch.setattr("plait.tuning.service.job_queue.MAX_WAITING", 2)
    for _ in range(2):
        started(client)
    answer = posted(client)
    assert error_of(answer)[:2] == (429, "too_many_jobs")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("writer", ["JobStore.open_or_create", "write_json"])
def test_a_job_that_finds_no_room_on_the_disk_is_told_and_leaves_nothing(tmp_path, desk, client, monkeypatch, writer):
    """500 with what the system says, no matter how far it came; a cancellation likewise."""

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    job_id = started(client)
    monkeypatch.setattr(f"plait.tuning.service.job_queue.{writer}", no_room)
    answers = [posted(client)]
    if writer == "write_json":
        answers.append(client.post(f"{URL}/{job_id}/cancel", headers=BOSS))
    for answer in answers:
        assert error_of(answer) == (500, "job_not_kept", None)
        assert "No space left on device" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [job_id]
    assert [job["id"] for job in desk.jobs()] == [job_id]


# ---- the desk --------------------------------------------------------------------------------------------------------


def test_of_many_jobs_few_are_in_memory(tmp_path, monkeypatch):
    """Those that were looked at last; the others are read again when they are asked for."""
    monkeypatch.setattr("plait.tuning.service.job_queue._KEPT_OPEN", 2)
    client = client_of(desk_in(tmp_path / "jobs", Threads()))
    read, open_one = [], JobStore.open
    monkeypatch.setattr(JobStore, "open", lambda folder: read.append(folder.name) or open_one(folder))
    ids = [started(client) for _ in range(3)]
    for job_id in (*ids, ids[0], ids[0]):
        assert client.get(f"{URL}/{job_id}", headers=BOSS).json()["status"] == "queued"
    assert read == [*ids, *ids, ids[0]]


def test_the_same_token_is_the_same_job(desk):
    """So a call that is repeated after a crash makes no second job."""
    assert desk.submit(SHORT, "ops", "t")["id"] == desk.submit(SHORT, "ops", "t")["id"]
    assert len(desk.jobs()) == 1


def test_a_new_desk_goes_on_where_a_killed_one_stopped(tmp_path):
    """A job whose process or desk died is started again, by whatever desk there is; then the next one."""

    def killed(*_):
        raise KeyboardInterrupt

    first = desk_in(tmp_path, killed)
    one, two = first.submit(SHORT, "ops", "1")["id"], first.submit(SHORT, "ops", "2")["id"]
    with pytest.raises(KeyboardInterrupt):
        first.work_once()
    assert first.job(one)["status"] == "queued"
    second = desk_in(tmp_path, Threads(deaths=MAX_DEATHS - 1))
    assert second.work_once()
    assert second.work_once()
    assert not second.work_once()
    assert [second.job(each)["status"] for each in (one, two)] == ["finished", "finished"]


def test_a_job_that_only_dies_is_given_up(tmp_path):
    """After three deaths without a measurement, with the exit code; the next job runs."""
    desk = desk_in(tmp_path, Threads(deaths=MAX_DEATHS))
    one, two = desk.submit(SHORT, "ops", "1")["id"], desk.submit(SHORT, "ops", "2")["id"]
    assert desk.work_once()
    assert desk.work_once()
    job = desk.job(one)
    assert job["status"] == "failed"
    assert "ended 3 times without a measurement (exit code -9)" in job["reason"]
    assert desk.job(two)["status"] == "finished"


def test_a_job_that_can_not_be_measured_fails_with_its_reason(tmp_path):
    """The measurer's own words, and no second attempt, also by a desk whose forerunner could not note the end."""
    runner = Threads(knobs=["engine.replicas"])
    desk = desk_in(tmp_path, runner)
    job_id = desk.submit(SHORT, "ops", "1")["id"]
    assert desk.work_once()
    assert "there is no knob" in desk.job(job_id)["reason"]
    assert desk.job(job_id)["status"] == "failed"
    (tmp_path / job_id / "ended.json").unlink()
    assert desk_in(tmp_path, runner).work_once()
    assert desk.job(job_id)["status"] == "failed"
    assert len(runner.started) == 1


def test_a_damaged_job_hides_no_other(tmp_path):
    """Its folder is told as failed, with what is wrong; the others go on."""
    desk = desk_in(tmp_path, Threads())
    bad, good = desk.submit(SHORT, "ops", "1")["id"], desk.submit(SHORT, "ops", "2")["id"]
    (tmp_path / bad / "job.sqlite").write_text(100 * "{")
    again = desk_in(tmp_path, Threads())
    assert {each["id"]: each["status"] for each in again.jobs()} == {bad: "failed", good: "queued"}
    assert error_of(client_of(again).get(f"{URL}/{bad}", headers=BOSS))[:2] == (500, "job_unreadable")
    assert again.work_once()
    assert again.work_once()
    assert again.job(good)["status"] == "finished"


@pytest.mark.parametrize("left", [b"", b'{"status": "fin', b"[]"])
def test_an_end_that_was_written_in_part_stops_no_desk(tmp_path, left):
    """As a host that loses power may leave it: the job's own records say how it ended."""
    desk = desk_in(tmp_path, Threads())
    one, two = desk.submit(SHORT, "ops", "1")["id"], desk.submit(SHORT, "ops", "2")["id"]
    assert desk.work_once()
    (tmp_path / one / "ended.json").write_bytes(left)
    again = desk_in(tmp_path, Threads())
    assert [each["status"] for each in again.jobs()] == ["queued", "queued"]
    while again.work_once():
        pass
    assert [again.job(each)["status"] for each in (one, two)] == ["finished", "finished"]
    (tmp_path / one / "ticket.json").write_bytes(left)
    assert [each["id"] for each in again.jobs()] == [two]
    assert error_of(client_of(again).get(f"{URL}/{one}", headers=BOSS))[:2] == (404, "job_not_found")


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_tuning_is_off_and_wants_an_admin():
    """Nobody but a key with the role admin, or the machine itself, may start processes."""
    user = {"sha256": "0" * 64}
    admin = {**user, "role": "admin"}
    assert not ServedConfig().tuning.enabled
    on = TuningSection(enabled=True)
    assert ServedConfig(tuning=on).tuning.enabled
    assert ServedConfig(tuning=on, server=ServerSection(host="0.0.0.0", api_keys=(admin,))).tuning.enabled
    for server in ({"api_keys": (user,)}, {"host": "0.0.0.0"}):
        with pytest.raises(ValidationError, match="a key with the role admin"):
            ServedConfig(tuning=on, server=server)


def test_the_ingress_adds_the_routes(desk):
    """Made in the replica, by a function that the application hands it."""
    ingress = Ingress({}, HttpSettings, routers=lambda _: (tuning_router(LocalTuningService(desk)),))
    client = TestClient(ingress.__serve_build_asgi_app__())
    assert client.get(URL).json() == {"object": "list", "data": []}
