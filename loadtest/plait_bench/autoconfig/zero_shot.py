"""Recommendations for a language model without any measurement of it. Two methods; which one is used is learned.

*Forest*: each group of trees over latency curves is one opinion about the latencies of all profiles at all loads. The
recommendation is the profile and number of pods with the largest expected value of `success * (1 - overspend)` over
these opinions, so that uncertainty about a profile counts against it. *Designer*: the profile that plait's designer
would try first, with as many pods as most other models need there.

The method, and the sizes of leaves and groups, are chosen by the S/O score on the models left for learning, each
treated as new in turn (nested: the model that is judged takes no part in any choice).

Symbols: P profiles on offer, L loads, T trees, G groups of trees.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median_low

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from plait_autoconfig.designers.plait_designer import PlaitDesigner
from plait_bench.autoconfig.llm_pilot import (
    ITL_MS,
    NTTFT_MS,
    Advice,
    PilotData,
    pods_for,
    service_of,
    so_score,
    users_at_slo,
)

_TREES = 60
_LEAVES, _GROUPS = (1, 3), (3, 10)
_LOADS = tuple(2**n for n in range(8))
_PODS = tuple(pods_for(users) for users in _LOADS[1:])

Floats = NDArray[np.float64]


def advise(data: PilotData, model: str, *, seed: int) -> Advice:
    """Recommend a profile and pods for one model, learning from all others."""
    others = [other for other in sorted(data.curves) if other != model]
    ways = _ways(seed)
    scores = {}
    for way, advise_by in ways.items():
        advice = {held: advise_by(data, [other for other in others if other != held], held) for held in others}
        scores[way] = so_score(data, advice)
    return ways[max(scores, key=lambda way: scores[way])](data, others, model)


_Way = Callable[[PilotData, Sequence[str], str], Advice]
"""`(data, models to learn from, model) -> the recommendation`."""


def _ways(seed: int) -> dict[str, _Way]:
    known: dict[tuple[str, ...], Floats] = {}
    forests = {
        f"forest {leaf} {groups}": partial(_by_forest, leaf=leaf, groups=groups, seed=seed, known=known)
        for leaf in _LEAVES
        for groups in _GROUPS
    }
    return {**forests, "designer": partial(_by_designer, seed=seed)}


def _by_forest(
    data: PilotData,
    learned: Sequence[str],
    model: str,
    *,
    leaf: int,
    groups: int,
    seed: int,
    known: dict[tuple[str, ...], Floats],
) -> Advice:
    """Recommend by forest. `known`: forests grown already, shared by methods that only group their trees
    differently."""
    key = (*learned, model, str(leaf))
    if key not in known:
        known[key] = _predicted(data, learned, model, leaf, seed)
    return _best(data, model, known[key], groups)


def _by_designer(data: PilotData, learned: Sequence[str], model: str, *, seed: int) -> Advice:
    library = [service_of(data, other).as_run() for other in learned]
    new = service_of(data, model)
    designer = PlaitDesigner(new.space, new.objective, seed=seed, library=library, context=new.context)
    cell = designer.ask()
    profile = f"{cell['count']} x {cell['accelerator']}"
    there = [users_at_slo(data.curves[other][profile]) for other in learned if profile in data.curves[other]]
    usual = median_low(there) if there else 0
    return Advice(profile=profile, pods=pods_for(max(1, usual)))


def _predicted(data: PilotData, learned: Sequence[str], model: str, leaf: int, seed: int) -> Floats:
    """Return the log of the worse latency, relative to its limit, by tree, profile and load (T, P, L)."""
    rows, values = [], []
    for other, (profile, points) in itertools.chain.from_iterable(
        zip(itertools.repeat(other), data.curves[other].items(), strict=False) for other in learned
    ):
        for point in points:
            rows.append(_features(data, other, profile, point.users))
            values.append([math.log(max(point.nttft_ms, 0.1) / NTTFT_MS), math.log(point.itl_ms / ITL_MS)])
    forest = ExtraTreesRegressor(_TREES, min_samples_leaf=leaf, bootstrap=True, random_state=seed, n_jobs=1)
    forest.fit(np.array(rows), np.array(values))
    profiles = sorted(data.curves[model])
    wanted = np.array([_features(data, model, profile, load) for profile in profiles for load in _LOADS])
    trees = np.array([tree.predict(wanted) for tree in forest.estimators_]).max(-1)
    return np.asarray(trees).reshape(_TREES, len(profiles), len(_LOADS))


def _best(data: PilotData, model: str, logs: Floats, groups: int) -> Advice:
    """Return the cheapest profile and number of pods that the averaged opinions of the groups allow."""
    profiles = sorted(data.curves[model])
    opinions = logs.reshape(groups, -1, *logs.shape[1:]).mean(1)  # (G, P, L)
    kept = np.cumprod(opinions <= 0.0, axis=2).sum(2)
    pods = np.where(kept > 0, np.ceil(200.0 / 2.0 ** np.maximum(kept - 1, 0)), np.inf)  # (G, P)
    prices = np.array([data.prices[profile] for profile in profiles])
    cheapest = (pods * prices).min(1)
    cheapest = np.where(np.isfinite(cheapest), cheapest, (pods_for(1) * prices).min())
    value = {
        (profile, number): float(
            ((number >= pods[:, at]) * np.maximum(0.0, 2.0 - number * prices[at] / cheapest)).mean()
        )
        for at, profile in enumerate(profiles)
        for number in _PODS
    }
    profile, number = max(value, key=lambda each: value[each])
    return Advice(profile=profile, pods=number)


def _features(data: PilotData, model: str, profile: str, users: int) -> list[float]:
    """Return the features of a model, a profile and a load: sizes, rates, and the ratios that a roofline would use."""
    llm, gpu = data.models[model], data.profiles[profile]
    count, bandwidth = float(gpu["gpu_n_gpus"]), float(gpu["gpu_memory_bandwidth"])
    memory, weights = float(gpu["gpu_memory_capacity_gb_total"]), float(llm["model_n_parameters"])
    rates = ("gpu_tflops_tc_fp16", "gpu_tflops_cuda_mixed", "gpu_tflops_cuda_fp32")
    compute = max(float(gpu[name]) for name in rates)
    ratios = [weights / (count * bandwidth), weights / memory, weights / (count * compute)]
    sizes = [count, weights, bandwidth, compute, memory]
    flags = [float(llm[f"model_is_{name}"] == "TRUE") for name in ("encoder_decoder", "flash_attention")]
    shape = [float(llm["model_n_layers"]), float(llm["model_n_heads"])]
    width = 4.0 if llm["model_torch_dtype"] == "float32" else 2.0
    return [*(math.log2(each) for each in (*ratios, *sizes, users)), *flags, *shape, width]
