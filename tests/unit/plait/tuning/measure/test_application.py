"""A running application is changed: what is reported is what happened to its processes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from plait.config import PlaitConfig
from plait.server.cluster import DeploymentState
from plait.server.restarts import Effect
from plait.tuning.measure import application
from plait.tuning.measure.application import RunningApplication

BEFORE = {11: "ingress", 12: "cn-picks", 13: "hn-picks"}


def config(window: int) -> PlaitConfig:
    """A server of one ranking model that is cut in two."""
    models = {"picks": {"folder": "./picks", "cn": {"knobs": {"window": window}}}}
    return PlaitConfig.model_validate({"images": None, "recommend": {"models": models}})


def running(monkeypatch: pytest.MonkeyPatch, after: dict[int, str]) -> RunningApplication:
    """An application with the processes of `BEFORE`, and those of `after` once it was changed."""
    seen = iter([BEFORE, after])
    states: Iterator[Any] = iter([DeploymentState(running=True)])
    cluster = SimpleNamespace(url="http://127.0.0.1:1", deploy=lambda *_, **__: None, states=lambda _: states)
    monkeypatch.setattr(application, "replica_pids", lambda *_, **__: next(seen))
    monkeypatch.setattr(application, "health", lambda _: None)
    return RunningApplication(cluster, lambda _: None, app="app", salt="s", config=config(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, {"cn-picks": Effect.RECONFIGURED}),
        ({11: "ingress", 22: "cn-picks", 13: "hn-picks"}, {"cn-picks": Effect.RESTARTED}),
        (
            {11: "ingress", 22: "cn-picks", 23: "hn-picks"},
            {"cn-picks": Effect.RESTARTED, "hn-picks": Effect.RESTARTED},
        ),
    ],
    ids=["as-meant", "restarted", "another-one-too"],
)
def test_a_restart_that_was_not_meant_is_told(
    monkeypatch: pytest.MonkeyPatch, after: dict[int, str], expected: dict[str, Effect]
) -> None:
    """A trial behind it measures cold workers, and a live service is away meanwhile."""
    assert running(monkeypatch, after).apply(config(8), limit_s=5.0) == expected
