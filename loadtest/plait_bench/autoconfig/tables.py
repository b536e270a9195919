"""Recorded tables: every cell of a space measured on a real system, as a file that searches are replayed on.

JSON (``.json`` or ``.json.gz``)::

    {"format": "plait-table", "version": 1, "name": "recommender",
     "knobs": [{"name": "threads", "kind": "int", "low": 1, "high": 4, "step": 1, "log": false, "unit": ""},
               {"name": "batch", "kind": "choice", "values": [1, 4, 16], "ordered": true, "when": {"threads": [1, 2]}}],
     "constraints": ["threads * batch <= 32"],
     "objective": {"goal": "max goodput_per_cost", "limits": ["p99_ms <= 50"]},
     "services": [{"service": "rm1", "workload": {"candidates": 64}, "hardware": {"name": "...", "cpus": 2},
                   "cells": [{"config": {"threads": 1, "batch": 4}, "trials": [{"metrics": {"goodput_per_cost": 3.1}}]},
                             {"config": {"threads": 4, "batch": 4}, "trials": [{"failure": "crash", "detail": ""}]}]}]}

A cell's ``trials`` are in the order of measurement: the n-th trial of a search shows the n-th; the truth, on which
searches are judged, is their mean. Every cell of the space must be there, for every service.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait_autoconfig.designers.protocols import Context
from plait_autoconfig.errors import TunerError
from plait_autoconfig.knobs import ChoiceKnob, FloatKnob, IntKnob, Knob
from plait_autoconfig.objective import Objective, parse_objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, Hardware, Outcome, pooled
from plait_bench.autoconfig.tasks import Service, Suite, leave_one_out
from plait_bench.errors import BenchError

FORMAT, VERSION = "plait-table", 1
_KINDS: Mapping[str, type[IntKnob | FloatKnob | ChoiceKnob]] = {
    "int": IntKnob, "float": FloatKnob, "choice": ChoiceKnob
}  # fmt: skip


def table_workload(path: Path) -> Suite:
    """The file as a workload: each of its services against the others. Raises `BenchError` saying what is wrong."""
    try:
        stored = path.read_bytes()
        return suite_of(json.loads(gzip.decompress(stored) if path.suffix == ".gz" else stored))
    except (OSError, EOFError, ValueError, KeyError, TypeError, TunerError) as error:
        raise BenchError(f"{path} is no table of trials: {error!r}") from error


def suite_of(document: Mapping[str, Any]) -> Suite:
    """See `table_workload`; raises what Python raises."""
    if (document["format"], document["version"]) != (FORMAT, VERSION):
        msg = f"it is {document['format']} version {document['version']}, not {FORMAT} version {VERSION}"
        raise ValueError(msg)
    space = Space(tuple(map(_knob, document["knobs"])), tuple(document["constraints"]))
    goal = document["objective"]
    objective = parse_objective(goal["goal"], goal.get("limits", ()))
    services = {each["service"]: _service(each, space, objective) for each in document["services"]}
    trials = min(60, len(space.cells()))
    marks = tuple(mark for mark in (1, 5, 10, 30) if mark <= trials)
    return Suite(name=document["name"], tasks=leave_one_out(services), trials=trials, marks=marks)


def _knob(fields: Mapping[str, Any]) -> Knob:
    given = {name: value for name, value in fields.items() if name != "kind"}
    if "when" in given:
        given["when"] = {name: tuple(values) for name, values in given["when"].items()}
    return _KINDS[fields["kind"]](**given)


def _service(fields: Mapping[str, Any], space: Space, objective: Objective) -> Service:
    found = {}
    for cell in fields["cells"]:
        key = space.key(space.check(cell["config"]))
        found[key] = tuple(_outcome(trial) for trial in cell["trials"])
    shown, truth = {}, []
    for at, config in enumerate(space.cells()):
        outcomes = found.get(space.key(config), ())
        known = pooled(outcomes)
        if known is None:
            msg = f"{fields['service']} has no valid trial of {dict(config)}"
            raise ValueError(msg)
        shown[at] = outcomes
        truth.append(known)
    context = Context(
        service=fields["service"], workload=fields.get("workload", {}), hardware=Hardware(**fields.get("hardware", {}))
    )
    return Service(space=space, objective=objective, truth=tuple(truth), context=context, shown=shown)


def _outcome(fields: Mapping[str, Any]) -> Outcome:
    if "failure" in fields:
        return Outcome.failed(FailureKind(fields["failure"]), fields.get("detail", ""))
    return Outcome(metrics=fields["metrics"])
