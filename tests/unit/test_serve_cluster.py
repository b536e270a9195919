"""Starting Serve where its HTTP proxy takes longer than Serve waits, as on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions, serve

from plait import cluster
from plait.cluster import Cluster
from plait.config import PlaitConfig, ServerSection
from plait.errors import ServeError


def proxies(monkeypatch: pytest.MonkeyPatch, states: Iterator[Mapping[str, str]]) -> list[Mapping[str, Any]]:
    """Serve ends the first proxy, which its caller hears of, and these are seen then. What it was started with."""
    started: list[Mapping[str, Any]] = []

    def start(**options: Any) -> None:
        started.append(options)
        raise exceptions.RayActorError

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(proxies=next(states)))
    monkeypatch.setattr(cluster, "_PROXY_POLL_S", 0.001)
    return started


def test_the_next_proxy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve starts another by itself: starting it again would start nothing."""
    states: list[Mapping[str, str]] = [{}, {"node": "STARTING"}, {"node": "UNHEALTHY"}, {"node": "HEALTHY"}]
    left = iter(states)
    started = proxies(monkeypatch, left)
    Cluster._start_serve(PlaitConfig(), 8123)
    assert list(left) == []
    (options,) = started
    assert options["http_options"]["port"] == 8123


def test_a_proxy_that_never_comes_is_told_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as long as a start may take."""
    proxies(monkeypatch, iter(lambda: {"node": "STARTING"}, None))
    config = PlaitConfig(server=ServerSection(ready_timeout_s=0.05))
    with pytest.raises(ServeError, match=r"HTTP proxy was not ready after 0\.05 s \(starting\)"):
        Cluster._start_serve(config, 8123)
