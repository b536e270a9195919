"""A small Ray with Serve in the test's own process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.server.environment import patient_start
from support.server import free_port

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


_STARTED = ExitStack()
_is_started = False


def stop_shared() -> None:
    """Stops the session's Ray, if there is one. An idle one takes a fifth of a core from the tests that come after."""
    _STARTED.close()


@contextmanager
def _local_serve() -> Iterator[SharedServe]:
    """Serve on a Ray of our own, gone afterwards. Replicas can import what tests can."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # as `plait serve` does: other tests keep the cores busy
    import ray
    from ray import serve

    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # for busy machines; Serve's default is 5
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        with patient_start(_START_S):
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 << 20,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                _temp_dir=f"{folder}/1",
                _node_ip_address="127.0.0.1",
            )
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        try:
            yield SharedServe(serve, port)
        finally:
            serve.shutdown()
            ray.shutdown()
