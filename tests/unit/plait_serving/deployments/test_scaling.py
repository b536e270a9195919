"""The numbers of CNs and HNs in a configuration, and how Serve is told to follow the load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from plait.config import ServedConfig
from plait.tuning.measure.cost import reserved
from plait_disagg.queue.knobs import WorkerKnobs
from plait_serving.deployments.scaling import PRESSURE, autoscaling, busy_share, engine_pressure
from plait_serving.images.config import ImagesSection
from plait_serving.ranking.config import HnSection, RankingSection, RankModelSection
from plait_serving.sections import Replicas


def test_a_number_or_a_range() -> None:
    """Both kinds of workers have their own; Ray must have room for the most."""
    model = RankModelSection.model_validate(
        {"folder": "/x", "cn": {"replicas": {"min": 2, "max": 5}}, "hn": {"replicas": 3}}
    )
    assert (model.cn.min_replicas, model.cn.max_replicas) == (2, 5)
    assert (model.hn.min_replicas, model.hn.max_replicas) == (3, 3)
    config = ServedConfig(images=None, recommend=RankingSection(models={"m": model}))
    assert reserved(config).cores == pytest.approx(0.1 + 0.2 * 8)
    for bad in ({"min": 3, "max": 2}, {"min": 0, "max": 2}, {"max": 65}, {"min": 1}, 0, "many"):
        with pytest.raises(ValidationError):
            HnSection.model_validate({"replicas": bad})


def test_controlnets_follow_the_load_up_to_the_engines() -> None:
    """A range for a ControlNet counts at its max; one beyond the engines is refused by name."""
    section = {"controlnets": {"edges": {"folder": "/x", "replicas": {"max": 3}, "num_cpus": 1.0}}, "num_cpus": 1.0}
    images = ImagesSection.model_validate({**section, "replicas": {"max": 4}})
    assert reserved(ServedConfig(images=images, recommend=None)).cores == pytest.approx(0.1 + 4 + 3)
    with pytest.raises(ValidationError, match=r"controlnets\.edges\.replicas\.max: 3 of them for at most 2"):
        ImagesSection.model_validate({**section, "replicas": 2})


def test_a_controlnet_is_as_busy_as_its_compute_thread() -> None:
    """Its pressure is that thread's share of the time between two readings."""
    assert busy_share({"busy_s": 2.0}, {"busy_s": 5.0}, 4.0) == 0.75
    assert busy_share({"busy_s": 2.0}, {"busy_s": 2.0}, 4.0) == 0.0


@pytest.mark.parametrize(
    ("compute_s", "queued_s", "pressure"),
    [(0.0, 0.0, 0.0), (5.0, 0.0, 0.5), (10.0, 3.0, 1.0), (0.0, 5.0, 0.5), (2.0, 15.0, 1.5), (10.0, 900.0, 2.0)],
    ids=["idle", "half busy", "busy", "while a model loads", "more waits than it does", "a backlog"],
)
def test_the_pressure_is_what_computes_or_what_waits(compute_s, queued_s, pressure):
    """Whichever is more, over ten seconds; bounded, since a backlog does not say how many replicas are missing."""
    before = {"compute_s": 7.0, "queued_s": 0.0}
    after = {"compute_s": 7.0 + compute_s, "queued_s": queued_s}
    assert engine_pressure(before, after, 10.0) == pytest.approx(pressure)


def test_serve_follows_the_pressure_of_its_replicas() -> None:
    """Through Serve's own configuration and wrapper: up at once after the time that was asked for, then down."""
    config = AutoscalingConfig(**autoscaling(Replicas(min=1, max=4, up_after_s=5.0, down_after_s=60.0)))
    policy = _apply_autoscaling_config(_resolve_policy_callable(config.policy))
    state: dict[str, object] = {}
    count = 1

    def tick(now_s: float, *pressures: float) -> int:
        nonlocal state
        context = SimpleNamespace(
            aggregated_metrics={PRESSURE: dict(enumerate(pressures))}, policy_state=state, current_time=now_s,
            target_num_replicas=count, current_num_replicas=len(pressures) or 1, total_num_requests=0.0, config=config,
        )  # fmt: skip
        wanted, state = policy(context)
        return int(wanted)

    assert [tick(now_s, 1.4) for now_s in (0.0, 4.0, 5.0)] == [1, 1, 3]
    count = 3
    assert [tick(now_s, 0.1, 0.1, 0.1) for now_s in (10.0, 60.0, 70.0)] == [3, 3, 1]
    count = 1
    assert tick(80.0) == 1


def test_every_knob_of_a_worker_can_be_configured() -> None:
    """A reconfigure says what it means, and an HN's says nothing that is a CN's."""
    knobs = WorkerKnobs.model_validate({"cores": [0, 1], "order": "arrival", "refuse_late": False, "batch_wait_ms": 2})
    assert knobs == WorkerKnobs(cores=(0, 1), order="arrival", refuse_late=False, batch_wait_ms=2.0)
    assert WorkerKnobs.model_validate(knobs.model_dump(mode="json")) == knobs
    with pytest.raises(ValidationError, match="window"):
        HnSection.model_validate({"knobs": {"window": 2}})
    assert RankModelSection(folder=Path("/x")).cn.omp_wait == "passive"
