"""All checks that can refuse a job before anything is started, and the parts that a trial is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plait.config import PlaitConfig, ServerSection, TuningSection, load_config
from plait.errors import PlaitError, told
from plait.precision import with_dtype
from plait.tuning.measure.early_stop import Guard
from plait.tuning.measure.knobs import apply_knobs, check_names, check_values
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.spec import Choice, JobSpec, KnobSpec, TuningTarget, guard_limits
from plait_autoconfig.values import Value
from plait_disagg.package.manifest import PackageError, read_manifest
from plait_loadtest.errors import LoadtestError
from plait_loadtest.judging import slos_of
from plait_loadtest.load import load_scenario
from plait_loadtest.measure import requests_to_judge
from plait_loadtest.scenario import InferClass, Scenario
from plait_loadtest.session import at_rate
from plait_serving.spelling import hint

_GUARDED = ("p50_ms", "p95_ms", "p99_ms", "error_rate")
METRICS = frozenset(
    {
        "attainment", "cost_per_hour", "cpu_cores", "error_rate", "goodput_per_cost", "goodput_per_s", "memory_gib",
        "offered_per_s", "p50_ms", "p99_ms", "quality_drift", "reserved_cores", "reserved_cost_per_hour",
        "used_cost_per_hour",
    }
)  # fmt: skip
"""The metrics of a trial of plait's own measurer (`plait.tuning.measure.measurer`)."""
_API = {"images": "images", "recommend": "infer"}


def prepare(spec: JobSpec, config: PlaitConfig) -> tuple[tuple[Scenario, ...], Guard | None]:
    """Check knobs, scenarios and guard against the configuration; return the scenarios, without an address, and the
    guard. Raises `JobRefused`."""
    assert isinstance(spec.target, TuningTarget)
    check_metrics(spec, METRICS)
    sets = {name: knob.sets or name for name, knob in spec.knobs.items()}
    _check_deployments(spec.target, sets.values())
    with told(PlaitError, to=JobRefused):
        check_names(config, sets.values())
        for name, knob in spec.knobs.items():
            values = [*_extremes(knob), *([spec.reference.config[name]] if name in spec.reference.config else [])]
            check_values(config, sets[name], values)
        apply_knobs(config, spec.settings(spec.default))
    scenarios = scenarios_of(spec)
    for scenario in scenarios:
        _check_model(scenario, config)
    return scenarios, guard_of(spec)


def scenarios_of(spec: JobSpec) -> tuple[Scenario, ...]:
    """Return the job's scenarios at the offered rate. Raises `JobRefused`."""
    scenarios = tuple(scenario_of(spec, source) for source in spec.scenarios)
    loads_s = sum(scenario.warm_up_s + scenario.duration_s for scenario in scenarios)
    if spec.trial_limit_s <= loads_s:
        raise JobRefused(f"trial_limit_s: {spec.trial_limit_s:g} s end before the loads, which take {loads_s:g} s")
    return scenarios


def target_config(target: TuningTarget, *, live: bool) -> PlaitConfig:
    """Return the configuration of the job's target. A clone serves only what is tuned, on this machine only, without
    keys.

    Raises `JobRefused`.
    """
    with told(PlaitError, to=JobRefused):
        config = load_config(None if target.config is None else Path(target.config), settings=target.settings)
    if target.app == "images" and config.images is None:
        raise JobRefused("target.app: the configuration serves no images (images is null)")
    if target.app == "recommend" and not config.ranking_models:
        raise JobRefused("target.app: the configuration has no recommendation model")
    if live:
        return config
    if config.images is not None and config.ray.is_local:  # as `plait serve` would on this machine
        config = config.model_copy(update={"images": with_dtype(config.images)})
    server = ServerSection(
        port=0,
        direct_port=config.server.direct_port,  # the clone takes another
        allowed_hosts=None if config.ray.is_local else (),  # that Ray's Serve has an address of its own
        largest_body_bytes=config.server.largest_body_bytes,
        drain_s=2.0,
    )
    other = "recommend" if target.app == "images" else "images"
    return config.model_copy(update={"server": server, other: None, "tuning": TuningSection()})


def scenario_of(spec: JobSpec, source: Any) -> Scenario:
    """Return a scenario of the job at the offered rate. Raises `JobRefused` if it cannot give a valid result."""
    # How to keep the scenario's load, where the job did not ask for another.
    advice = "; `offered: given` measures at the scenario's own rate" if spec.is_capacity_search else ""
    with told(LoadtestError, to=lambda said: JobRefused(f"scenarios: {said}{advice}")):
        scenario = load_scenario(source, {})
        if spec.rate_per_s is not None:
            scenario = at_rate(scenario, spec.rate_per_s, scenario.duration_s)
        elif spec.is_capacity_search:
            at_rate(scenario, 1.0, scenario.duration_s)
    wanted = _API.get(spec.target.app, scenario.target.api)
    if scenario.target.api != wanted:
        raise JobRefused(
            f"scenarios: {scenario.name} is for the API {scenario.target.api}, {spec.target.app} has {wanted}"
        )
    rate = getattr(scenario.arrivals, "rate_per_s", None)
    if spec.is_capacity_search and not slos_of(scenario):
        raise JobRefused(f"scenarios: {scenario.name} has no slo, which a search for capacity needs{advice}")
    needed = requests_to_judge(scenario)
    if rate is not None and rate * scenario.duration_s < needed:
        raise JobRefused(
            f"scenarios: {scenario.name} sends about {rate * scenario.duration_s:.0f} requests in "
            f"{scenario.duration_s:g} s; its SLO needs {needed} to be judged: duration_s: {math.ceil(needed / rate)}"
        )
    return scenario


def guard_of(spec: JobSpec) -> Guard | None:
    """Return the guard of a live service. Raises `JobRefused` for limits that cannot be watched while a load runs."""
    if not spec.target.live:
        return None
    found: dict[str, float] = {}
    for limit in guard_limits(spec.target.live):
        if limit.metric not in _GUARDED or limit.bound != "at_most":
            raise JobRefused(f"target.live.guard: {limit} cannot be watched; {', '.join(_GUARDED)} <= ... can")
        # What is seen while a load runs is the p95 of the last moments: a p99 is at least that, a p50 at most.
        name = "error_rate" if limit.metric == "error_rate" else "p95_ms"
        found[name] = min(limit.value, found.get(name, limit.value))
    return Guard(**found, every_s=spec.target.live.check_every_s)


def max_replicas_config(spec: JobSpec, config: PlaitConfig) -> PlaitConfig:
    """Return the configuration with the most and largest replicas in the space, to size a Ray that fits them all."""
    sized = {knob.sets or name: knob for name, knob in spec.knobs.items()}
    sizes = {name: _extremes(knob) for name, knob in sized.items() if name.endswith((".replicas", ".num_cpus"))}
    return apply_knobs(config, {name: max(it for it in of if not isinstance(it, str)) for name, of in sizes.items()})


def check_metrics(spec: JobSpec, there: frozenset[str]) -> None:
    """Check that a trial shows what the job asks for. Raises `JobRefused`."""
    for name in spec.goal.metrics:
        if name not in there:
            near = hint(name, there) or f"; there are {', '.join(sorted(there))}"
            raise JobRefused(f"objective and limits: there is no metric {name}{near}")


def _check_model(scenario: Scenario, config: PlaitConfig) -> None:
    """Check names of models, inputs and outputs; with a wrong one every request would be refused."""
    for item in scenario.mix:
        if not isinstance(item, InferClass):
            continue
        name, where = scenario.target.model, f"scenarios: {scenario.name}: {item.name}"
        if name not in config.ranking_models:
            there = ", ".join(config.ranking_models)
            raise JobRefused(f"{where} asks for the model {name!r}; the configuration has {there}")
        with told(PackageError, to=JobRefused):
            manifest = read_manifest(config.ranking_models[name].folder)
        inputs = {each.name for each in item.inputs} or {item.dense_name, item.ids_name}
        for given, known, what in (
            (inputs, {each.name for each in manifest.inputs}, "input"),
            (set(item.outputs), set(manifest.outputs), "output"),
        ):
            if given - known:
                detail = f"{what} {min(given - known)!r}; {name} has {', '.join(sorted(known))}"
                raise JobRefused(f"{where} has an {detail}")
        if lacking := {each.name for each in manifest.inputs} - inputs:
            raise JobRefused(f"{where} lacks the input {min(lacking)!r} of {name}")


def _check_deployments(target: TuningTarget, sets: Iterable[str]) -> None:
    for name in sets if target.deployments else ():
        if name.rpartition(".")[0] not in target.deployments:
            there = ", ".join(target.deployments)
            raise JobRefused(f"knobs: {name} is not of a deployment that target.deployments names ({there})")


def _extremes(knob: KnobSpec) -> list[Value]:
    """Return all values of a choice, or both ends of a range: what lies between is allowed if these are."""
    return list(knob.values) if isinstance(knob, Choice) else [knob.low, knob.high]
