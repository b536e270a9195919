"""Knobs of two services meet by what they set, not by what they are called: `hn_threads` of one job and `dense` of
another are the same if both set the threads of an HN.

What a knob sets is `DEPLOYMENT.setting`. Deployments of one role differ by a name after the first hyphen (`hn-picks`,
`hn-films`), so `hn.threads` is what two of them have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.values import Config, Value

__all__ = ["in_terms_of"]


def in_terms_of(run: LibraryRun, sets: Mapping[str, str], reference: Config) -> LibraryRun:
    """Return a past run in terms of a job's knobs. `sets`: what each of these sets; `reference`: the job's.

    A knob of the job that the run did not vary is taken to have been as in the reference. A knob of the run that the
    job does not have is left out: configurations that differed in nothing else become repeats of one. A run that has no
    knob in common with the job is returned as it is.
    """
    theirs = dict.fromkeys(name for trial in run.trials for name in trial.config)
    source = {name: found for name, what in sets.items() if (found := _same(run, list(theirs), name, what)) is not None}
    if not source or (list(source) == list(source.values()) and set(theirs) == set(source) == set(sets)):
        return run
    absent = {name: reference[name] for name in sets if name not in source and name in reference}
    trials = tuple(replace(trial, config=_config(trial.config, source) | absent) for trial in run.trials)
    units = {name: run.units[found] for name, found in source.items() if found in run.units}
    return replace(run, trials=trials, units=units, sets={name: sets[name] for name in source})


def _same(run: LibraryRun, theirs: list[str], name: str, what: str) -> str | None:
    """Return the knob of the run that sets the same: exactly, or of a deployment of the same role; or, if nobody said
    what it sets, the one with the same name."""
    said = {their: run.sets.get(their, their) for their in theirs}
    for alike in (lambda other: other == what, lambda other: _by_role(other) == _by_role(what)):
        found = next((their for their, other in said.items() if alike(other)), None)
        if found is not None:
            return found
    return name if name in theirs and name not in run.sets else None


def _by_role(setting: str) -> str:
    deployment, dot, rest = setting.rpartition(".")
    return f"{deployment.partition('-')[0]}{dot}{rest}"


def _config(config: Config, source: Mapping[str, str]) -> dict[str, Value]:
    return {name: config[theirs] for name, theirs in source.items() if theirs in config}
