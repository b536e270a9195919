"""The specification of a job: what is tuned, over which knobs, under which load, for what goal, and at what cost.

The boundary of the package: YAML becomes one frozen `JobSpec` (`job_file.parse_job`). Unknown keys and wrong types
are errors; nothing is changed later. Contradictions are rejected here, before anything is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

from plait_autoconfig.constraints import Formula
from plait_autoconfig.errors import OutsideSpace, TunerError
from plait_autoconfig.knobs import ChoiceKnob, FloatKnob, IntKnob, Knob
from plait_autoconfig.objective import GOODPUT_PER_COST, GOODPUT_PER_S, Limit, Objective, parse_objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, Value

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

KnobName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]

_Values: TypeAlias = Annotated[tuple[Value, ...], Field(min_length=1)]


_KNOBS: Mapping[str, Any] = {"int": IntKnob, "float": FloatKnob, "choice": ChoiceKnob}


class _SpecModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# ---- what is tuned ---------------------------------------------------------------------------------------------------


class LiveTuning(_SpecModel):
    """Permission to tune the application that serves users. `guard`: limits (`p99_ms <= 200`); a breach rolls back."""

    guard: Annotated[tuple[str, ...], Field(min_length=1)]
    check_every_s: float = Field(default=1.0, gt=0, description="how often the guard looks")
    leave: Literal["best", "original"] = Field(default="original", description="what the service is left with")


class TuningTarget(_SpecModel):
    """An application of plait to tune. A clone of it is tuned, unless `live` is set."""

    config: str | None = Field(default=None, description="a plait.yaml; none: plait's default")
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="path: value, set over the config")
    app: Literal["images", "recommend"] = "images"
    deployments: tuple[str, ...] = Field(default=(), description="whose knobs are tuned; none: those that knobs name")
    live: Literal[False] | LiveTuning = False

    @property
    def is_shared(self) -> bool:
        """Whether trials change what others use: one worker at a time, and it is given back."""
        return bool(self.live)


_Address: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^/]")]


class Reserves(_SpecModel):
    """What a configuration of a service costs: numbers, or formulas of the knobs such as `replicas * threads`."""

    cores: float | str = 0.0
    gpus: float | str = 0.0
    memory_gib: float | str | None = Field(default=None, description="none: as measured")


class ServiceTarget(_SpecModel):
    """Any service that answers over HTTP: `command` starts one for each configuration, or `apply` changes one that
    runs. Both are lists of arguments, without a shell.

    `{port}` in `command`, `ready` and `url` is a free port of this machine, `{file}` the path of what `knobs: file`
    writes: `file` with the value of each knob at the path that it sets, `applications.0.route_prefix`; an entry of a
    list goes by its position or its `name`. `argv` appends `--NAME=VALUE`, and `--NAME` or `--no-NAME` for true and
    false.
    """

    app: ClassVar[str] = "service"
    live: ClassVar[Literal[False]] = False

    command: tuple[str, ...] = ()
    apply: tuple[str, ...] = Field(
        default=(), description="its end with code 0 says that the configuration is in force"
    )
    ready: _Address | None = Field(default=None, description="answers GET with 2xx once the service takes requests")
    url: _Address | None = Field(default=None, description="where the load goes; none: the host and port of `ready`")
    knobs: Literal["argv", "env", "file"] = "argv"
    file: str | None = None
    folder: str = Field(default=".", description="where both run: that of the job's file")
    reserves: Reserves = Reserves()

    @property
    def is_shared(self) -> bool:
        """See `TuningTarget`."""
        return bool(self.apply)

    @property
    def address(self) -> str:
        """Where the load goes, placeholders included."""
        return self.url or "/".join((self.ready or "").split("/")[:3])

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if bool(self.command) == bool(self.apply):
            raise ValueError("a service has either `command`, which starts it, or `apply`, which changes it")
        if self.command and not self.ready:
            raise ValueError("`command` needs `ready`, a URL that answers once the service takes requests")
        if not self.address:
            raise ValueError("`apply` needs `url`, where the load goes")
        if (self.knobs == "file") != (self.file is not None):
            raise ValueError("`file`, a YAML or JSON file, goes with `knobs: file`")
        if self.knobs == "file" and not any("{file}" in each for each in (*self.command, *self.apply)):
            raise ValueError("`knobs: file` needs {file} among the arguments")
        return self


def _kind_of(target: object) -> str:
    named = target.keys() if isinstance(target, Mapping) else set()
    is_service = isinstance(target, ServiceTarget) or named & {"command", "apply", "ready", "url"}
    return "service" if is_service else "plait"


Target: TypeAlias = Annotated[
    Annotated[TuningTarget, Tag("plait")] | Annotated[ServiceTarget, Tag("service")], Discriminator(_kind_of)
]


# ---- the space -------------------------------------------------------------------------------------------------------


class _Knob(_SpecModel):
    sets: str = Field(default="", description="what it sets: DEPLOYMENT.knob; none: its own name")
    unit: str = ""
    when: dict[str, _Values] = Field(default_factory=dict, description="active only while knob: one of the values")

    def knob(self, name: str) -> Knob:
        """Return the knob of the space."""
        made: Knob = _KNOBS[self.model_dump()["kind"]](name=name, **self.model_dump(exclude={"kind", "sets"}))
        return made


class IntRange(_Knob):
    """Integers from `low` to `high`."""

    kind: Literal["int"]
    low: int
    high: int
    step: int = 1
    log: bool = False


class FloatRange(_Knob):
    """Numbers from `low` to `high`, in increments of `step` if given."""

    kind: Literal["float"]
    low: float
    high: float
    step: float | None = None
    log: bool = False


class Choice(_Knob):
    """One of `values`; `ordered`: they form a scale, such as powers of two."""

    kind: Literal["choice"]
    values: _Values
    ordered: bool = False


KnobSpec: TypeAlias = Annotated[IntRange | FloatRange | Choice, Field(discriminator="kind")]


# ---- how it is searched ----------------------------------------------------------------------------------------------


class Prices(_SpecModel):
    """Prices per hour, in any one currency. `basis`: what a configuration pays for, the cores that it reserves or the
    processor time that it was seen to use. Memory is priced as measured, GPUs as reserved."""

    basis: Literal["reserved", "used"] = "reserved"
    core: float = Field(default=0.04, ge=0)
    gpu: float = Field(default=2.0, ge=0)
    gib: float = Field(default=0.005, ge=0)


class Budget(_SpecModel):
    """The budget. `trials`: measurements of proposed configurations; reference and confirmation come on top.

    `minutes`: of everything, except the time between a crash and the resumption. Time for the confirmation is
    reserved. The measurement that runs when the time is up is finished.
    """

    trials: int = Field(default=12, ge=1, le=10_000)
    minutes: float | None = Field(default=None, gt=0)

    def left_s(self, used_s: float) -> float:
        """Return what is left of the minutes; infinite without a limit."""
        return float("inf") if self.minutes is None else 60.0 * self.minutes - used_s


class Confirm(_SpecModel):
    """After the search at most (1 + `best`) x `times` runs, where they decide what is recommended, fewer if that is
    sure sooner; the leader and the reference get `times` of them each.

    A candidate that is worse than the leader with the probability `sure` is not measured again, and the reference stays
    unless something is better with that probability.
    """

    best: int = Field(default=5, ge=0, le=20)
    times: int = Field(default=2, ge=1, le=50)
    sure: float = Field(default=0.95, gt=0.5, lt=1)

    @property
    def runs(self) -> int:
        """The most runs."""
        return (1 + self.best) * self.times if self.best else 0


class Reference(_SpecModel):
    """The configuration that all others are compared with: what runs today, or a rule of thumb.

    `every`: measured again after that many trials (0: only at the start), to detect a drifting host. `noise`: what a
    measurement usually scatters by, relative. A change that such noise does not explain is divided out of later
    measurements; one of more than `most_drift` raises a warning, because then the correction cannot be trusted either.
    """

    config: dict[KnobName, Value]
    why: str = Field(default="", description="where these values come from")
    every: int = Field(default=5, ge=0)
    noise: float = Field(default=0.1, gt=0)
    most_drift: float = Field(default=0.3, gt=0)
    warm_up: bool = Field(default=False, description="measure it once before, and forget the result")


class DesignerChoice(_SpecModel):
    """Which designer proposes the trials."""

    name: str = "plait"


class Stop(_SpecModel):
    """When to stop before the budget is spent. Never, by default.

    `patience`: the best did not improve by `least_gain` (relative) for that many trials. `expected_gain`: the
    designer, if it can estimate that, expects that less than this (relative) is left to gain, after `least_trials`.
    """

    patience: int = Field(default=0, ge=0)
    least_gain: float = Field(default=0.01, ge=0)
    expected_gain: float = Field(default=0.0, ge=0, lt=1)
    least_trials: int = Field(default=5, ge=1)


class JobSpec(_SpecModel):
    """A complete job. Paths are absolute: `job_file.parse_job` makes them so."""

    name: Name
    target: Target = TuningTarget()
    knobs: Annotated[dict[KnobName, KnobSpec], Field(min_length=1)]
    constraints: tuple[str, ...] = Field(default=(), description="between knobs: `cpus * replicas <= 2`")
    candidates: tuple[dict[KnobName, Value], ...] | Literal["measured"] = Field(
        default=(), description="the only configurations to propose; measured: those of the library"
    )
    scenarios: Annotated[tuple[str | dict[str, JsonValue], ...], Field(min_length=1)]
    offered: Literal["given", "capacity"] | None = Field(
        default=None,
        description="the scenario's rate, or the highest that holds the SLO; none: this one for the most goodput",
    )
    objective: str = "max goodput_per_cost"
    limits: tuple[str, ...] = Field(default=(), description="`p99_ms <= 50`")
    rate_tolerance: float = Field(default=0.02, ge=0, lt=1, description="`at rate R` allows so much less goodput")
    prices: Prices = Prices()
    budget: Budget = Budget()
    repeats: int = Field(default=1, ge=1, le=20, description="measurements of each proposed configuration")
    confirm: Confirm = Confirm()
    reference: Reference
    designer: DesignerChoice = DesignerChoice()
    stop: Stop = Stop()
    seed: int = Field(default=0, ge=0)
    library: str | None = Field(default=None, description="past runs to learn from; this one is added to it")
    starter_library: bool = Field(default=True, description="learn from the runs that come with plait, too")
    storage: str | None = Field(
        default=None, description="a database URL for a copy of the trials, which Optuna's tools show"
    )
    trial_limit_s: float = Field(default=300.0, gt=0, description="a trial that takes longer is ended by force")
    start_limit_s: float = Field(default=180.0, gt=0, description="how long the measuring process may take to start")

    @cached_property
    def space(self) -> Space:
        """The knobs and constraints in the form that designers use."""
        candidates = () if self.candidates == "measured" else self.candidates
        return Space(tuple(each.knob(name) for name, each in self.knobs.items()), self.constraints, candidates)

    @cached_property
    def goal(self) -> Objective:
        """The objective with its limits; `at rate R` means at least R less `rate_tolerance`."""
        wanted = parse_objective(self.objective, self.limits)
        own = len(self.limits)
        at_rate = wanted.limits[: len(wanted.limits) - own]
        relaxed = tuple(Limit(each.metric, each.bound, each.value * (1.0 - self.rate_tolerance)) for each in at_rate)
        return Objective(wanted.goals, relaxed + wanted.limits[len(at_rate) :])

    @property
    def rate_per_s(self) -> float | None:
        """The R of `at rate R`: the rate that a measurer offers instead of the scenario's; None: the scenario's."""
        at_rate = parse_objective(self.objective).limits
        return max(each.value for each in at_rate) if at_rate else None

    @property
    def is_capacity_search(self) -> bool:
        """Whether a trial looks for the highest rate that holds the SLO. At a given rate, goodput says nothing about
        speed: so the most goodput, also per cost, is that at capacity, unless the job says otherwise."""
        if self.offered is not None:
            return self.offered == "capacity"
        return self.rate_per_s is None and any(
            goal.direction == "max" and goal.metric in (GOODPUT_PER_S, GOODPUT_PER_COST) for goal in self.goal.goals
        )

    @property
    def default(self) -> Config:
        """The reference configuration. It may lie outside the space: then only the names of its knobs are checked."""
        try:
            return self.space.check(self.reference.config)
        except OutsideSpace:
            return dict(self.reference.config)

    def settings(self, config: Config) -> dict[str, Value]:
        """Return a configuration by the settings that its knobs stand for: `{"engine.largest_batch": 4}`."""
        return {self.knobs[name].sets or name: value for name, value in config.items()}

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        try:
            self.space.cells()
            goal = self.goal
            if self.target.live:
                guard_limits(self.target.live)
            if isinstance(self.target, ServiceTarget):
                self._check_service(self.target)
        except TunerError as error:
            raise ValueError(str(error)) from error
        if self.candidates == "measured" and self.library is None:
            raise ValueError("candidates: measured needs a library")
        unknown = [name for name in self.reference.config if name not in self.knobs]
        if unknown:
            raise ValueError(f"reference.config sets {unknown[0]}, which is no knob; they are {', '.join(self.knobs)}")
        missing = [name for name, each in self.knobs.items() if not each.when and name not in self.reference.config]
        if missing:
            raise ValueError(f"reference.config lacks {missing[0]}")
        self._check_sets()
        if goal.costs and not any((self.prices.core, self.prices.gpu, self.prices.gib)):
            raise ValueError(f"prices: core, gpu and gib are all 0, so {goal.costs[0]} has no value")
        rates = [limit for limit in goal.limits if limit.metric == GOODPUT_PER_S]
        if self.is_capacity_search and rates:
            raise ValueError(f"`{rates[0]}` asks for a given rate, not for the capacity: offered: given")
        return self

    def _check_sets(self) -> None:
        """Check that no two knobs that are active together set the same. Raises `ValueError`."""
        everything = [each.sets or name for name, each in self.knobs.items()]
        doubled = {name for name in everything if everything.count(name) > 1}
        for config in (*self.space.cells(), self.default) if doubled else ():
            active = [self.knobs[name].sets or name for name in config]
            twice = next((name for name in active if active.count(name) > 1), None)
            if twice:
                raise ValueError(f"two knobs set {twice}")

    def _check_service(self, target: ServiceTarget) -> None:
        """Check what the service costs. Raises `SpaceError` or `ValueError`."""
        known = {name: formula for name, formula in self.reserved_by.items() if formula is not None}
        configs = (*self.space.cells(), self.default)
        taken = [{name: formula.value(config) for name, formula in known.items()} for config in configs]
        named = target.reserves.cores or target.reserves.gpus
        if self.goal.costs and self.prices.basis == "reserved" and not named:
            raise ValueError(f"{self.goal.costs[0]} needs target.reserves: what a configuration takes, {{cores: 2}}")
        prices = {"cores": self.prices.core, "gpus": self.prices.gpu, "memory_gib": self.prices.gib}
        is_measured = bool(self.prices.gib) and "memory_gib" not in known  # then nobody knows before
        for config, amounts in zip(configs, taken, strict=True):
            is_free = not any(prices[name] and amount for name, amount in amounts.items()) and not is_measured
            if is_free and GOODPUT_PER_COST in self.goal.costs and self.prices.basis == "reserved":
                shown = ", ".join(f"{name} = {value}" for name, value in config.items())
                raise ValueError(f"{GOODPUT_PER_COST} needs a cost, and by prices and target.reserves {shown} has none")
        if target.apply and self.prices.basis == "used":
            raise ValueError("prices.basis: what a service uses is only seen of one that target.command starts")

    @cached_property
    def reserved_by(self) -> Mapping[str, Formula | None]:
        """The formulas of a service's `reserves`."""
        given = self.target.reserves if isinstance(self.target, ServiceTarget) else Reserves()
        formulas = {name: getattr(given, name) for name in ("cores", "gpus", "memory_gib")}
        return {
            name: None if each is None else Formula.parse(str(each), tuple(self.knobs))
            for name, each in formulas.items()
        }


def guard_limits(live: LiveTuning) -> tuple[Limit, ...]:
    """Return the guard of a live service as limits on metrics. Raises `ObjectiveError`."""
    return parse_objective("max goodput_per_s", live.guard).limits


def changed_settings(before: JobSpec, after: JobSpec) -> tuple[str, ...]:
    """Return the names of fields that changed but may not, once something was measured.

    Budget, confirmation, stop rule, time limits and candidates may change: they determine how far to go, not what is
    measured.
    """
    free = {"candidates", "budget", "confirm", "stop", "trial_limit_s", "start_limit_s", "library"}
    old, new = before.model_dump(), after.model_dump()
    return tuple(name for name in old if name not in free and old[name] != new[name])
