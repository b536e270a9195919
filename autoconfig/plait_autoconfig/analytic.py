"""What theory says about a deployment before anything was measured: a roofline per replica, and a queue before it.

It is told what knobs mean (`Meaning`), and knows nothing else: one kind of service with usual constants stands for all.
So it is only right about shapes (too small batches waste, too many threads share too few cores, waiting costs latency),
and whoever uses it must be ready to drop it. A replica's step takes ``fixed + batch * request`` of a unit of time
(Williams et al., "Roofline", CACM 2009: below the knee a batch costs what one request costs), divided by the speed of
its threads (Amdahl) and its device share; latency is the wait for a batch, the step, and the queue of an M/D/1 server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.errors import DesignerError
from plait_autoconfig.objective import COST_PER_HOUR, GOODPUT_PER_COST, GOODPUT_PER_S, P99_MS, Objective
from plait_autoconfig.values import Config

Floats = NDArray[np.float64]


class Meaning(StrEnum):
    """What a knob is, as far as theory cares. Knobs without a meaning are taken to make no difference."""

    BATCH = "batch"  # most requests in a step
    THREADS = "threads"  # of a replica
    REPLICAS = "replicas"
    DEVICE_SHARE = "device_share"  # of an accelerator, any unit
    WAIT_MS = "wait_ms"  # how long a batch may gather


# Usual constants: a step of one request takes 10 ms, four fifths of it fixed; nine tenths of the work is parallel.
_FIXED_MS, _REQUEST_MS, _PARALLEL = 8.0, 2.0, 0.9
_LOAD = 0.7  # of capacity, where latencies are compared
_REPLICA_COST, _DEVICE_COST = 0.5, 4.0  # beside one per thread, in the price of a core

_KNOWN = (GOODPUT_PER_COST, GOODPUT_PER_S, COST_PER_HOUR, P99_MS)


def analytic_losses(
    cells: Sequence[Config], objective: Objective, meanings: Mapping[str, str], *, cpus: int = 0
) -> Floats | None:
    """Log losses (N,) up to a constant, lower is better; None if theory says nothing about this.

    ``meanings``: by knob. ``cpus``: of the machine, 0 if that is not known. Raises `DesignerError` for a meaning that
    does not exist.
    """
    goal = objective.require_one_goal()
    meant = _checked(meanings)
    if goal.metric not in _KNOWN or not meant:
        return None
    batch, threads, replicas, share, wait_ms = (
        _column(cells, meant.get(meaning), default)
        for meaning, default in (
            (Meaning.BATCH, 1.0), (Meaning.THREADS, 1.0), (Meaning.REPLICAS, 1.0), (Meaning.DEVICE_SHARE, 0.0),
            (Meaning.WAIT_MS, 0.0),
        )
    )  # fmt: skip
    crowd = np.maximum(1.0, threads * replicas / cpus) if cpus else np.ones(len(cells))
    speed = 1.0 / ((1.0 - _PARALLEL) + _PARALLEL / np.maximum(threads, 1e-3)) / crowd
    relative = share / share.max() if share.max() > 0 else np.ones(len(cells))
    step_ms = (_FIXED_MS + _REQUEST_MS * batch) / (speed * np.maximum(relative, 1e-3))
    per_s = 1e3 * replicas * batch / (step_ms + 0.1 * wait_ms)
    price = replicas * (threads + _REPLICA_COST + _DEVICE_COST * relative * (share.max() > 0))
    queue_ms = step_ms * _LOAD / (2.0 * (1.0 - _LOAD))  # M/D/1, Pollaczek-Khinchine
    metric = {
        GOODPUT_PER_COST: per_s / price,
        GOODPUT_PER_S: per_s,
        COST_PER_HOUR: price,
        P99_MS: wait_ms + step_ms + 3.0 * queue_ms,
    }[goal.metric]
    return np.asarray(np.log(metric) if goal.direction == "min" else -np.log(metric))


def _checked(meanings: Mapping[str, str]) -> dict[Meaning, str]:
    """Knobs by meaning."""
    found = {}
    for knob, meaning in meanings.items():
        if meaning not in set(Meaning):
            msg = f"{knob} can not mean {meaning!r}; meanings are {', '.join(Meaning)}"
            raise DesignerError(msg)
        found[Meaning(meaning)] = knob
    return found


def _column(cells: Sequence[Config], knob: str | None, default: float) -> Floats:
    """The values of a knob (N,), the default where it is absent or no number."""
    values = [default if knob is None else cell.get(knob, default) for cell in cells]
    return np.array([default if isinstance(value, str) else float(value) for value in values])
