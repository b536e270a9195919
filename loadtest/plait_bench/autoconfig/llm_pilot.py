"""The table of LLM-Pilot (SC 2024): 10 language models on up to 14 GPU profiles; which, and how many, for 200 users?

Protocol of the publication (github.com/IBM/LLM-performance-prediction, 3c66483, Predict_LLM_performance.ipynb): a pod
holds the largest measured number of users up to which median nTTFT <= 100 ms and median ITL <= 50 ms; a recommendation
is a profile and a number of pods; it succeeds if these hold 200 users; overspend is relative to the cheapest profile
that does; the S/O score is the harmonic mean of the success rate and 1 - mean overspend of the successes. As there,
only the profiles that were measured for a model are on offer. A *cell* is a profile; its trial measures all loads.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from plait_autoconfig.designers.protocols import ServiceContext
from plait_autoconfig.knobs import ChoiceKnob
from plait_autoconfig.objective import COST_PER_HOUR, Objective, at_least, minimise
from plait_autoconfig.space import Space
from plait_autoconfig.values import TrialOutcome
from plait_bench.autoconfig.tasks import Service, Suite, leave_one_out
from plait_bench.errors import BenchError

USERS, NTTFT_MS, ITL_MS = 200, 100.0, 50.0
SLO_USERS = "users_at_slo"
OBJECTIVE = Objective((minimise(COST_PER_HOUR),), (at_least(SLO_USERS, 0.5),))
_ACCELERATORS = ("T4", "A10", "V100", "A100", "H100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load on one profile: medians in ms."""

    users: int
    nttft_ms: float
    itl_ms: float


Curves = Mapping[str, Mapping[str, tuple[Point, ...]]]
"""By model and profile (`2 x A100`); loads ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotData:
    """The files of the publication. `prices`: per hour, by profile. Features are unchanged from the files."""

    curves: Curves
    prices: Mapping[str, float]
    models: Mapping[str, Mapping[str, str]]
    profiles: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A recommendation: a profile and the number of pods."""

    profile: str
    pods: int


def read(folder: Path) -> PilotData:
    """Read the files of the publication. Raises `BenchError` if files are missing or not as published."""
    try:
        curves: dict[str, dict[str, list[Point]]] = {}
        for row in _rows(folder / "expected_predictions_LLM-Pilot.csv"):
            point = Point(
                users=int(row["num_users"]), nttft_ms=float(row["median_nttft"]), itl_ms=float(row["median_itl"])
            )
            curves.setdefault(row["model"], {}).setdefault(row["gpu"], []).append(point)
        return PilotData(
            curves={
                model: {gpu: tuple(sorted(points, key=lambda point: point.users)) for gpu, points in by_gpu.items()}
                for model, by_gpu in curves.items()
            },
            prices={row["GPU"]: float(row["price"]) for row in _rows(folder / "prices.csv") if row["GPU"]},
            models={row["model"]: row for row in _rows(folder / "llm_features.csv")},
            profiles={row["gpu"]: row for row in _rows(folder / "gpu_features.csv")},
        )
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{folder} does not hold the LLM-Pilot tables: {error!r}") from error


def users_at_slo(points: Iterable[Point]) -> int:
    """Return the largest load up to which both limits hold; 0 if not even the smallest does."""
    largest = {"nttft_ms": 0, "itl_ms": 0}
    for name, limit in (("nttft_ms", NTTFT_MS), ("itl_ms", ITL_MS)):
        for point in points:
            if getattr(point, name) > limit:
                break
            largest[name] = point.users
    return min(largest.values())


def pods_for(users: int) -> int:
    """Return how many pods hold all users, if one pod holds `users` of them (more than 0)."""
    return math.ceil(USERS / users)


def so_score(data: PilotData, advice: Mapping[str, Advice | None]) -> float:
    """Compute the S/O score of one recommendation per model (None: none was found)."""
    met, overspends = 0, []
    for model, advised in advice.items():
        costs = _true_costs(data, model)
        if advised is None or advised.profile not in costs:
            continue
        if advised.pods >= pods_for(users_at_slo(data.curves[model][advised.profile])):
            met += 1
            overspends.append(advised.pods * data.prices[advised.profile] / min(costs.values()) - 1.0)
    return _harmonic(met / len(advice), overspends)


def _harmonic(success: float, overspends: Sequence[float]) -> float:
    thrift = max(0.0, 1.0 - fmean(overspends)) if overspends else 0.0
    return 2.0 * success * thrift / (success + thrift) if success + thrift > 0 else 0.0


def score_of_regrets(regrets: Sequence[float]) -> float:
    """Compute the S/O score when a measured profile is recommended (its pods are then known), or nothing (regret 1),
    per model.

    Regret is 1 - cheapest / cost, so overspend is regret / (1 - regret).
    """
    overspends = [regret / (1.0 - regret) for regret in regrets if regret < 1.0]
    return _harmonic(len(overspends) / len(regrets), overspends)


def best_static(data: PilotData, models: Sequence[str]) -> float:
    """Score the best single recommendation for all models, chosen with hindsight (as the publication does)."""
    profiles = {profile for model in models for profile in data.curves[model]}
    everyone = [Advice(profile=profile, pods=pods) for profile in sorted(profiles) for pods in (*range(1, 11), 15, 20)]
    return max(
        so_score(data, {m: each if each.profile in data.curves[m] else None for m in models}) for each in everyone
    )


def _true_costs(data: PilotData, model: str) -> dict[str, float]:
    """Return the hourly costs of the profiles that can hold at least one user."""
    users = {profile: users_at_slo(points) for profile, points in data.curves[model].items()}
    return {profile: pods_for(each) * data.prices[profile] for profile, each in users.items() if each > 0}


def suite(data: PilotData) -> Suite:
    """Make the suite: every model against the nine others; at most all of its profiles are tried."""
    services = {model: service_of(data, model) for model in sorted(data.curves)}
    tasks = tuple(task for task in leave_one_out(services))
    return Suite(name="llm-pilot", tasks=tasks, trials=6, marks=(1, 3, 5))


def service_of(data: PilotData, model: str) -> Service:
    """Return a model as a service to tune."""
    curves = data.curves[model]
    absent = [
        f"not (accelerator == '{name}' and count == {count})"
        for name in _ACCELERATORS
        for count in (1, 2, 4)
        if f"{count} x {name}" not in curves
    ]
    knobs = (
        ChoiceKnob(name="accelerator", values=_ACCELERATORS),
        ChoiceKnob(name="count", values=(1, 2, 4), ordered=True),
    )
    space = Space(knobs, tuple(absent))
    profiles = [f"{cell['count']} x {cell['accelerator']}" for cell in space.cells()]
    return Service(
        space=space,
        objective=OBJECTIVE,
        truth=tuple(_outcome(users_at_slo(curves[profile]), data.prices[profile]) for profile in profiles),
        context=ServiceContext(service=model, workload=_workload(data.models[model])),
    )


def _outcome(users: int, price: float) -> TrialOutcome:
    """Return the trial outcome of a profile. One that cannot hold a single user breaks the limit and costs as much as
    one that holds half a user."""
    pods = pods_for(users) if users else 2 * USERS
    return TrialOutcome.measured(**{COST_PER_HOUR: pods * price, SLO_USERS: float(users)})


def _workload(row: Mapping[str, str]) -> dict[str, float]:
    return {
        "parameters_b": float(row["model_n_parameters"]),
        "layers": float(row["model_n_layers"]),
        "heads": float(row["model_n_heads"]),
        "flash_attention": float(row["model_is_flash_attention"] == "TRUE"),
        "encoder_decoder": float(row["model_is_encoder_decoder"] == "TRUE"),
        "bytes_per_weight": 4.0 if row["model_torch_dtype"] == "float32" else 2.0,
    }


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))
