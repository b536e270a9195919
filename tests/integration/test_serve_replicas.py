"""`plait serve` from start to the last process gone: real Ray, Serve, HTTP and signals around the fake engine.

Of two ingresses and two engines one is missed by nobody, and whoever is asked knows what all have done.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from plait.server import processes
from plait_serving.cores import socket_folder
from support.asking import ask
from support.paused import pause
from support.prometheus import found, total
from support.server import FAKE, PlaitServer, free_port
from support.waiting import wait_for

pytestmark = pytest.mark.cluster

WAIT_S = 120.0


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 3,000 LoRAs, whose files nobody has to open for a request."""
    folder = tmp_path_factory.mktemp("loras")
    for number in range(3_000):
        (folder / f"lora-{number}.safetensors").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def direct_port() -> int:
    """Where the ingresses answer without Serve's proxy."""
    return free_port()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, loras: Path, direct_port: int) -> Callable[[], PlaitServer]:
    """Starts `plait serve` around the fake engine, always on the same port, with a home that does not exist."""
    root, port = tmp_path_factory.mktemp("replicas"), free_port()
    arguments = [str(port), "server.ingress_replicas=2", "images.replicas=2", "server.a1111_api=true"]
    arguments += ["server.trusted_proxies=[127.0.0.1]", "server.allowed_hosts=[pub.example]"]
    arguments += [f"images.results.folder={root / 'kept'}", f"server.direct_port={direct_port}"]
    environ = {"FAKE_LORAS": str(loras), "HOME": str(root / "no-home")}
    return lambda: PlaitServer.launch(FAKE, arguments, port=port, root=root, environ=environ)


@pytest.fixture(scope="module")
def server(launch: Callable[[], PlaitServer], direct_port: int) -> Iterator[PlaitServer]:
    """It runs until Ctrl-C."""
    running = launch()
    try:
        yield running.wait_ready()
        _ends_on_ctrl_c(running, direct_port)
    finally:
        if running.process.poll() is None:
            running.kill_and_clean()


def _ends_on_ctrl_c(server: PlaitServer, direct_port: int) -> None:
    """What runs is finished, who comes is refused, and nothing is left."""
    home, record = server.state_folder.parents[1] / "no-home", server.record()
    left, gone = server.members(), [server.state_folder / "run.json", Path(record.ray_folder or ""), home]
    replica, own = socket_of(server.replica_pids("engine")[0]), socket_of(os.getpid())
    steps = total(scrape_of_all(server), "fake_steps_total")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.generate, url=url_of(direct_port), prompt="slow", num_inference_steps=40)
        wait_for(lambda: server.metric("fake_steps_total") > steps)
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: Ray's processes get it too
        late = server.generate(prompt="late", num_inference_steps=1)
        while late[0] == 200:  # it has not begun to drain
            late = server.generate(prompt="late", num_inference_steps=1)
        assert (late[0], late[1]["error"]["type"]) == (503, "server_error")
        assert not asked.done()
        assert asked.result()[0] == 200
    assert server.wait() == 0
    assert processes.wait_until_gone(left, timeout_s=0) == []
    assert [path for path in gone if path.exists()] == []
    for freed in (server.port, direct_port):
        socket.create_server(("127.0.0.1", freed)).close()
    assert (replica.exists(), own.exists()) == (False, True)
    own.unlink()


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def socket_of(pid: int) -> Path:
    """A socket as a replica with that process leaves it when Ray kills it (finding 12)."""
    path = socket_folder() / f"rank-{pid}-0a1b2c3d"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return path


def test_the_next_server_cleans_up_after_kill_minus_9(
    server: PlaitServer, launch: Callable[[], PlaitServer], direct_port: int
) -> None:
    """While one runs another is refused; of one that was killed the next leaves nothing, and answers in its place."""
    second = launch()
    assert second.wait(300) == 1
    told = second.errors()
    assert f"plait already serves on port {server.port} (process {server.process.pid})" in told
    assert url_of(direct_port) in told
    old = server.members()
    assert len(old) > 5
    server.process.kill()
    server.wait()
    server.process = launch().wait_ready().process
    assert processes.wait_until_gone(old, timeout_s=0) == []
    assert server.generate(prompt="x", num_inference_steps=1)[0] == 200


def test_a_request_keeps_its_id_and_errors_are_told(server: PlaitServer, direct_port: int) -> None:
    """With Serve's proxy and without it."""
    for url in (server.url, url_of(direct_port)):
        status, body, headers = server.generate(prompt="x", headers={"x-request-id": "abc"}, url=url)
        assert (status, len(body["data"])) == (200, 1)
        assert [value for name, value in headers.items() if name.lower() == "x-request-id"] == ["abc"]
        assert server.generate(prompt="nan", url=url)[0] == 500
        assert server.generate(prompt="x", headers={"host": "evil.example"}, url=url)[0] == 403


def counters(server: PlaitServer) -> dict[tuple[str, ...], float]:
    """Every counter, by its labels; none where the answer is an error: the ingress that was asked is gone."""
    text = server.metrics()
    families = text_string_to_metric_families(text) if text.startswith("#") else ()
    return {
        (it.name, *sorted(it.labels.values())): it.value
        for each in families
        if each.type == "counter"
        for it in each.samples
    }


def until_two(server: PlaitServer, deployment: str) -> list[int]:
    """The processes of the two replicas, once there are two that answer."""
    pids: list[int] = []

    def two() -> bool:
        nonlocal pids
        pids = server.replica_pids(deployment)
        return len(pids) == 2

    wait_for(two, what=lambda: f"the second {deployment} of {pids}")
    return pids


def status_of(server: PlaitServer, **body: object) -> int:
    """The answer's status; 0 for none, or for the text of Serve's proxy instead of ours."""
    try:
        return server.generate(**body)[0]  # type: ignore[arg-type]
    except (OSError, ValueError):
        return 0


def statuses_of(server: PlaitServer, count: int, meanwhile: threading.Event) -> list[int]:
    """The answers to so many requests, four at a time; the event is set when the first has been answered."""
    statuses: list[int] = []

    def ask(numbers: range) -> None:
        for number in numbers:
            statuses.append(status_of(server, prompt=f"x{number}", num_inference_steps=10))
            meanwhile.set()

    threads = [threading.Thread(target=ask, args=(range(first, count, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return statuses


def test_every_scrape_counts_what_all_replicas_did(server: PlaitServer) -> None:
    """Requests spread over both ingresses and both engines; each scrape reaches one ingress (finding 9)."""
    for role in ("engine", "ingress"):
        until_two(server, role)
    before = scrape_of_all(server)
    for number in range(8):
        assert server.generate(prompt=f"x{number}", num_inference_steps=4)[0] == 200
    for _ in range(8):
        text = scrape_of_all(server)
        assert total(text, "plait_images_total") - sum(found(before, "plait_images_total")) == 8
        assert total(text, "fake_steps_total") - sum(found(before, "fake_steps_total")) == 8 * 4
        assert total(text, "plait_service_up", service="images") == 1


def test_a_killed_engine_costs_no_request_and_no_account(server: PlaitServer) -> None:
    """What it had is made again by the other one (finding 10), and its tenants' sums go on from what they were."""
    victim = until_two(server, "engine")[0]
    assert statuses_of(server, 8, threading.Event()) == [200] * 8
    used = images_used(server, at_least=8)
    begun = threading.Event()

    def kill() -> None:
        assert begun.wait(WAIT_S)
        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert statuses_of(server, 24, begun) == [200] * 24
    killer.join()
    until_two(server, "engine")
    images_used(server, at_least=used + 12)  # of the others the dead one may have made some


def test_a_lora_comes_and_goes_at_both_ingresses(server: PlaitServer, loras: Path) -> None:
    """With its file, and among thousands: each ingress hears of it from an engine, whichever made the request."""
    until_two(server, "ingress")
    asked = {"prompt": "x", "num_inference_steps": 1, "loras": [{"name": "new"}]}
    assert status_of(server, **{**asked, "loras": [{"name": "lora-2999"}]}) == 200
    assert status_of(server, **asked) == 404
    (loras / "new.safetensors").write_bytes(b"")
    until_all_are(server, 200, asked)
    (loras / "new.safetensors").unlink()
    until_all_are(server, 404, asked)


def test_what_a1111s_api_knows_is_the_same_at_both_ingresses(server: PlaitServer, loras: Path) -> None:
    """The checkpoint of a tenant, what it has running, and that it interrupts it: whichever ingress is asked."""
    until_two(server, "ingress")
    name = "emoji+lora-7"
    assert sdapi(server, "options", {"sd_model_checkpoint": name}) is None
    assert [sdapi(server, "options")["sd_model_checkpoint"] for _ in range(16)] == [name] * 16
    answers: list[Any] = []

    def make() -> None:
        answers.append(sdapi(server, "txt2img", {"prompt": "x", "steps": 50, "width": 16, "height": 16}))

    for _ in range(3):
        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: answers or sdapi(server, "progress")["state"]["job_count"] == 4)
        sdapi(server, "interrupt", {})
        for thread in threads:
            thread.join(WAIT_S)
        told = [json.loads(answer["info"])["interrupted"] for answer in answers]
        assert len(told) == 4
        if all(told):
            return
        answers.clear()  # a busy machine counted them when the first was done
    pytest.fail("no time had all four running")


def sdapi(server: PlaitServer, path: str, body: dict[str, object] | None = None) -> Any:
    """The answer of A1111's API."""
    answer = ask(f"{server.url}/sdapi/v1/{path}", body)
    assert answer.status == 200, answer.text
    return answer.json()


def test_a_reverse_proxys_word_crosses_serves_own(server: PlaitServer) -> None:
    """Serve's proxy leaves the address of who asks as it is, whatever that says of others, and what it was told."""
    said = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https", "x-forwarded-host": "pub.example"}
    _, answer, _ = server.generate(headers=said, prompt="x", response_format="url", num_inference_steps=1)
    assert answer["data"][0]["url"].startswith("https://pub.example/v1/images/results/")
    _, answer, _ = server.generate(prompt="x", response_format="url", num_inference_steps=1)
    assert answer["data"][0]["url"].startswith(server.url + "/v1/")
    assert ask(answer["data"][0]["url"]).headers["content-type"] == "image/png"


def until_all_are(server: PlaitServer, status: int, body: dict[str, object]) -> None:
    """Wait until sixteen requests in a row, of which each ingress has some, end so."""
    wait_for(lambda: all(status_of(server, **body) == status for _ in range(16)))


def scrape_of_all(server: PlaitServer) -> str:
    """Metrics in which both engines answered in time."""
    text = ""

    def complete() -> bool:
        nonlocal text
        text = server.metrics()
        return len(found(text, "plait_images_total")) + len(found(text, "fake_steps_total")) >= 4

    wait_for(complete, what=lambda: text)
    return text


def images_used(server: PlaitServer, *, at_least: int) -> int:
    """By the account, once it knows of so many: a replica that is slow to answer is counted a little later."""
    images = 0

    def enough() -> bool:
        nonlocal images
        images = sum(each["images"] for each in server.get("/v1/usage")[1]["data"])
        return images >= at_least

    wait_for(enough, what=lambda: f"account of {at_least} images, only {images},")
    return images


def test_a_scrape_and_a_probe_are_answered_while_no_engine_answers(server: PlaitServer) -> None:
    """Both are stopped: their numbers are missing, those of HTTP are there (finding 9); the health says it."""
    engines = until_two(server, "engine")
    server.metrics()
    for pid in engines:
        pause(pid)
    try:
        text = server.metrics()  # Serve itself would wait for ever
        status, health, _ = server.get("/health?workload=images")
    finally:
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
    assert (status, "engine" in health["reason"]) == (503, True)
    assert total(text, "plait_service_up", service="images") == 0
    assert found(text, "plait_requests_in_flight")
    assert not found(text, "fake_steps_total")


def test_the_other_ingress_answers_on(server: PlaitServer) -> None:
    """While Serve starts another one in the place of the one that was killed (finding 10). No counter falls: those of
    the dead one end, those of the new one begin."""
    victim = until_two(server, "ingress")[0]
    before = counters(server)
    os.kill(victim, signal.SIGKILL)
    until_s = time.monotonic() + WAIT_S
    answered = 0
    while answered < 5:
        assert time.monotonic() < until_s
        answered += status_of(server, prompt="x", num_inference_steps=1) == 200
        assert all(value >= before.get(series, 0) for series, value in counters(server).items())
    assert len(server.replica_pids("ingress")) < 2 or victim not in server.replica_pids("ingress")
    until_two(server, "ingress")
