"""A job file drafted from past runs: their knobs with the values that were measured, and their goal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from plait_autoconfig.errors import LibraryError
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.values import Value, cells_of

_GOALS = {"goodput_per_cost": "max", "goodput_per_s": "max", "p99_ms": "min"}
"""What a job is for where nobody said so: the first of these that was measured."""


def draft_job(run: LibraryRun, *, target: Any, scenario: str, library: str, only_measured: bool) -> dict[str, Any]:
    """Return the settings of a job on the service of a past run, which learns from the library that holds it.

    The reference is the configuration that was measured most often, or the first. `target`: the job's, unchecked;
    `only_measured`: it proposes nothing that was not measured before. A knob that was measured only with some values of
    another one is active only with these; one that always had the same value keeps it. Raises `LibraryError` for a run
    without a measurement or without a knob that varied.
    """
    ran = [trial for trial in run.trials if trial.outcome.failure is None]
    if not ran:
        raise LibraryError(f"{run.run_id} has no measurement that a job could start from")
    configs = [trial.config for trial in run.trials]
    seen = _values(configs)
    values = {name: those for name, those in seen.items() if len(those) > 1 or all(name in each for each in configs)}
    if all(len(those) == 1 for those in values.values()):
        raise LibraryError(f"{run.run_id} measured one configuration only: there is nothing to choose between")
    conditions = _conditions(configs, list(values))
    measured = set(ran[0].outcome.metrics)
    goal = next((f"{direction} {metric}" for metric, direction in _GOALS.items() if metric in measured), "")
    usual = max(cells_of(ran), key=lambda cell: len(cell.trials))
    settings: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", run.service).lstrip("._-")[:64] or "job",
        "target": target,
        "knobs": {
            name: _knob(run, name, values[name]) | conditions.get(name, {})
            for name in sorted(values, key=conditions.__contains__)  # after the knobs that they depend on
        },
        "scenarios": [scenario],
        "objective": run.goals[0] if run.goals else goal or "max goodput_per_cost",
        "library": library,
        "reference": {
            "config": {name: value for name, value in usual.config.items() if name in values},
            "why": f"measured {len(usual.trials)} times before" if len(usual.trials) > 1 else "measured before",
        },
    }
    return settings | ({"candidates": "measured"} if only_measured else {})


def _values(configs: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
    """Return the values that each knob was seen with, the numbers in order."""
    counted: dict[str, Counter[Value]] = {}
    for config in configs:
        for name, value in config.items():
            counted.setdefault(name, Counter())[value] += 1
    return {name: _ordered(list(seen)) for name, seen in counted.items()}


def _conditions(configs: Sequence[Mapping[str, Value]], names: Sequence[str]) -> dict[str, Any]:
    """Return `when` of each knob that is absent exactly with some values of one that never is."""
    always = [name for name in names if all(name in config for config in configs)]
    found: dict[str, Any] = {}
    for name in names:
        for parent in () if name in always else always:
            there = {config[parent] for config in configs if name in config}
            if not any(config[parent] in there for config in configs if name not in config):
                found[name] = {"when": {parent: _ordered(list(there))}}
                break
    return found


def _ordered(values: list[Value]) -> list[Value]:
    return sorted(values) if _are_numbers(values) else values


def _are_numbers(values: Sequence[Value]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _knob(run: LibraryRun, name: str, values: list[Value]) -> dict[str, Any]:
    knob: dict[str, Any] = {"kind": "choice", "values": values}
    if _are_numbers(values):
        knob["ordered"] = True
    if run.units.get(name):
        knob["unit"] = run.units[name]
    return knob | ({"sets": run.sets[name]} if name in run.sets else {})
