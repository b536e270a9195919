"""The tuner's names for knobs, what a change restarts, and what a configuration costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.config import PlaitConfig, load_config, parse_config
from plait.deployments import Effect, deployments, effects, logical_cpus
from plait.errors import PlaitError
from plait.tuning.measure.cost import ReservedResources, host_cores_of, known_costs, reserved
from plait.tuning.measure.knobs import apply_knobs, check_names, knob_places, settings_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_serving.cores import HostCores
from support.tune_jobs import job


@pytest.fixture
def config() -> PlaitConfig:
    """A base model with one ControlNet, and one model in two halves; nothing has to be there on disk."""
    return parse_config(
        {
            "images": {"model": "/m", "controlnets": {"edges": {"folder": "/edges"}}},
            "recommend": {"models": {"shop": {"folder": "/shop"}}},
        },
        source="test",
        folder=Path("/"),
    )


def test_every_deployment_has_its_knobs_and_replicas(config: PlaitConfig) -> None:
    """Names are DEPLOYMENT.knob, and halves that do not run now are there, but not active."""
    places = knob_places(config)
    wanted = {"engine.largest_batch", "engine.replicas", "controlnet-edges.threads", "cn-shop.window", "shop.mode"}
    assert wanted <= set(places)
    assert places["cn-shop.window"].path == ("recommend", "models", "shop", "cn", "knobs", "window")
    assert places["hn-shop.threads"].active
    assert not places["whole-shop.threads"].active


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("engine.largest_bach", "did you mean largest_batch?"),
        ("engin.threads", "did you mean engine?"),
        ("threads", "a service of another kind is tuned with target.command"),
        ("vllm.threads", "there is no deployment 'vllm'"),
        ("whole-shop.threads", "does not run in this configuration"),
    ],
)
def test_knobs_that_are_not_there_are_named(config: PlaitConfig, name: str, says: str) -> None:
    """The message names the knob and what there is instead."""
    with pytest.raises(PlaitError, match=says) as caught:
        check_names(config, [name, "engine.threads"])
    assert name in str(caught.value)


def test_a_half_that_a_knob_can_bring_may_be_tuned(config: PlaitConfig) -> None:
    """With the mode among the knobs, those of whole workers have a meaning."""
    check_names(config, ["shop.mode", "whole-shop.threads"])


def test_knobs_are_applied_and_nothing_else(config: PlaitConfig) -> None:
    """The configuration differs where the knobs say, and is valid."""
    changed = apply_knobs(config, {"engine.largest_batch": 4, "cn-shop.replicas": 2})
    assert changed.images.knobs.largest_batch == 4
    assert changed.ranking_models["shop"].cn.replicas == 2
    back = apply_knobs(changed, {"engine.largest_batch": 16, "cn-shop.replicas": 1})
    assert back == config


def test_a_core_budget_is_the_price_and_threads_are_a_cap_above_it(config: PlaitConfig) -> None:
    """What Ray sets aside is paid, fractions as they are, the ingress's tenth too. Threads cost nothing: as many as the
    budget rounded up, or more if they are given."""
    budgets = {
        "engine.num_cpus": 1.5,
        "controlnet-edges.num_cpus": 0.25,
        "cn-shop.num_cpus": 2.0,
        "cn-shop.threads": 4,
        "hn-shop.replicas": 2,
        "hn-shop.num_cpus": 0.5,
        "hn-shop.num_gpus": 0.5,
    }
    tuned = apply_knobs(config, budgets)
    what = reserved(tuned)
    assert (what.cores, what.gpus) == (pytest.approx(0.1 + 1.5 + 0.25 + 2.0 + 2 * 0.5), 2 * 0.5)
    assert logical_cpus(tuned) == 5
    caps = {row.name: row.knobs["threads"] for row in deployments(tuned) if row.knobs}
    assert caps == {"engine": 2, "controlnet-edges": 1, "cn-shop": 4, "hn-shop": 1}
    assert effects(deployments(config), deployments(tuned))["controlnet-edges"] is Effect.RESTARTED
    assert host_cores_of(tuned, machine_cores=9) == HostCores(cores=9, planned_threads=9)
    assert host_cores_of(tuned, machine_cores=8).is_shared


def costs_of(spec: JobSpec, config: PlaitConfig) -> tuple[float, ...]:
    """As a job on plait's own application knows them."""
    return known_costs(spec, lambda cell: reserved(apply_knobs(config, spec.settings(cell))))


def test_the_cost_of_every_cell_is_known_beforehand(config: PlaitConfig) -> None:
    """In the order of the cells, without their memory; nothing where memory is all that is paid for."""
    costs = costs_of(job(prices={"core": 0.1, "gib": 0.01}), config)
    cells = job().space.cells()
    alone = costs[cells.index({"replicas": 1, "batch": 1})]
    assert len(costs) == len(cells)
    assert costs[cells.index({"replicas": 3, "batch": 4})] - alone == pytest.approx(2 * 0.1 * 0.4)
    assert costs[cells.index({"replicas": 1, "batch": 8})] == alone
    assert costs_of(job(prices={"core": 0.0, "gpu": 0.0}), config) == ()
    assert costs_of(job(prices={"basis": "used"}), config) == ()


def test_costs_that_do_not_matter_are_not_counted(config: PlaitConfig) -> None:
    """Where the goal has none; and a cell that is no configuration is a matter of its trial."""
    assert costs_of(job(objective="min p99_ms"), config) == ()
    assert costs_of(job(objective="min cost_per_hour"), config)

    def refuse(_: object) -> ReservedResources:
        raise PlaitError("no such configuration")

    assert known_costs(job(), refuse) == ()


def test_settings_name_the_models_that_a_file_leaves_out() -> None:
    """A knob of the starter's recommender cannot stand in a file without its folder."""
    config = load_config()
    found = settings_of(config, {"cn-picks.window": 2, "engine.threads": 1})
    assert found["recommend", "models", "picks", "cn", "knobs", "window"] == 2
    assert found["recommend", "models", "picks", "folder"] == str(config.ranking_models["picks"].folder)
    assert found["images", "knobs", "threads"] == 1
    applied = apply_knobs(config, {"cn-picks.window": 2, "controlnet-edges.threads": 1})
    assert applied.ranking_models.keys() == config.ranking_models.keys()
    assert applied.images.resolved_controlnets().keys() == config.images.resolved_controlnets().keys()
    assert (applied.ranking_models["picks"].cn.knobs.window, applied.images.controlnets["edges"].threads) == (2, 1)
