"""A small Ray with Serve in the test's own process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from plait.config import ServerSection
from plait.server.environment import RAY_ENVIRONMENT, patient_start
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.images.config import ImagesSection
from support.asking import ask
from support.server import free_port
from support.waiting import wait_for

TESTS = Path(__file__).resolve().parents[1]
_START_S = 240.0


@dataclass(frozen=True)
class SharedServe:
    """``serve`` is the module; its proxy listens on ``port`` of 127.0.0.1. Whoever deploys deletes."""

    serve: Any
    port: int


@pytest.fixture(scope="session")
def shared_serve() -> Iterator[SharedServe]:
    """The session's one Ray in the tests' own process. Starting it takes ten seconds.

    conftest offers it. A module that imports it makes another fixture of it, whose Ray would end the first one.
    """
    global _is_started
    assert not _is_started, "a test module imports shared_serve: take it as an argument only"
    _is_started = True
    yield _STARTED.enter_context(_local_serve())
    stop_shared()


@pytest.fixture(scope="session")
def starters(shared_serve: SharedServe) -> Callable[[], str]:
    """Returns the address of a server with the starter models on the session's Ray, which the first who asks starts. It
    runs to the end of that: who takes it comes last (conftest)."""

    @cache
    def url() -> str:
        from plait.app import AppArgs, build

        images = ImagesSection(knobs=EngineKnobs(controlnet_placement=Placement.LOCAL, threads=1))
        args = AppArgs(images=images, server=ServerSection(drain_s=2))
        shared_serve.serve.run(build(args), name="starters", route_prefix="/")
        address = f"http://127.0.0.1:{shared_serve.port}"
        wait_for(lambda: is_ready(address), timeout_s=240)
        return address

    return url


def is_ready(url: str) -> bool:
    """Whether the server there has all its models."""
    try:
        answer = ask(url + "/v2/health/ready")
    except OSError:
        return False
    return answer.status == 200 and answer.json()["ready"] is True


_STARTED = ExitStack()
_is_started = False


def stop_shared() -> None:
    """Stops the session's Ray, if there is one. An idle one takes a fifth of a core from the tests that come after."""
    _STARTED.close()


@contextmanager
def _local_serve() -> Iterator[SharedServe]:
    """Serve on a Ray of our own, gone afterwards. Replicas can import what tests can (`PYTHONPATH`)."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        with patient_start(_START_S):
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 << 20,
                _temp_dir=f"{folder}/1",
                _node_ip_address="127.0.0.1",
            )
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        try:
            yield SharedServe(serve, port)
        finally:
            serve.shutdown()
            ray.shutdown()
