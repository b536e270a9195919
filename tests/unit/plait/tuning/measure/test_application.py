"""A running application is changed: what is reported is what happened to its processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.config import PlaitConfig
from plait.deployments import Effect
from plait.server.cluster import DeploymentState
from plait.tuning.measure import application
from plait.tuning.measure.application import RunningApplication, compose_of

BEFORE = {11: "ingress", 12: "cn-picks", 13: "hn-picks"}


def config(window: int, **model: Any) -> PlaitConfig:
    """A server of one ranking model that is cut in two."""
    models = {"picks": {"folder": "./picks", "cn": {"knobs": {"window": window}}, **model}}
    return PlaitConfig.model_validate({"images": None, "recommend": {"models": models}})


def running(monkeypatch: pytest.MonkeyPatch, after: dict[int, str]) -> tuple[RunningApplication, list[dict[str, Any]]]:
    """An application with the processes of `BEFORE`, those of `after` once it was changed; and how Serve gets it."""
    seen, deployed = iter([BEFORE, after]), list[dict[str, Any]]()
    cluster: Any = SimpleNamespace(
        url="http://127.0.0.1:1",
        host="127.0.0.1",
        nodes=lambda: None,
        deploy=lambda rows, **how: deployed.append({"rows": rows, **how}),
        states=lambda _: iter([DeploymentState(running=True)]),
    )
    monkeypatch.setattr(application, "replica_pids", lambda *_, **__: next(seen))
    monkeypatch.setattr(application, "health", lambda _: None)
    return RunningApplication(cluster, compose_of(), app="app", salt="s", config=config(4)), deployed


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, {"cn-picks": Effect.RECONFIGURED}),
        ({11: "ingress", 22: "cn-picks", 13: "hn-picks"}, {"cn-picks": Effect.RESTARTED}),
        ({11: "ingress", 22: "cn-picks", 23: "hn-picks"}, dict.fromkeys(("cn-picks", "hn-picks"), Effect.RESTARTED)),
    ],
)
def test_a_restart_that_was_not_meant_is_told(monkeypatch, after, expected):
    """A trial behind it measures cold workers, and a live service is away meanwhile."""
    app, _ = running(monkeypatch, after)
    assert app.apply(config(8), limit_s=5.0) == expected


def test_a_trial_measures_the_arguments_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs the dense half is read when an HN starts, so a trial of another one restarts it."""
    app, deployed = running(monkeypatch, {11: "ingress", 12: "cn-picks", 23: "hn-picks"})
    assert app.apply(config(4, executor="torch"), limit_s=5.0) == {"hn-picks": Effect.RESTARTED}
    salt = deployed[0]["salt"]
    versions = [
        {row.name: row.version(salt) for row in rows} for rows in (deployed[0]["rows"], compose_of()(config(4)))
    ]
    assert {name for name, version in versions[0].items() if version != versions[1][name]} == {"hn-picks"}


@pytest.mark.parametrize(("left_bytes", "in_place"), [(3 << 30, False), (1 << 30, True)])
def test_new_replicas_start_first_only_if_their_models_fit(monkeypatch, caplog, left_bytes, in_place):
    """As much memory as what they replace has now; otherwise old ones stop first, which is said."""
    app, deployed = running(monkeypatch, BEFORE)
    monkeypatch.setattr(application, "available_memory_bytes", lambda: left_bytes)
    monkeypatch.setattr(application, "pss_bytes", {11: 0, 12: 5 << 30, 13: 2 << 30}.get)
    app.apply(config(4, executor="torch"), limit_s=5.0)
    assert deployed[0]["in_place"] is in_place
    assert ("no room for one more replica of hn-picks" in caplog.text) is in_place
