"""A server's metrics travel with its answers, so that its clients can show them without asking."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from plait_fabric.rpc.fields import Header, WireError

__all__ = ["Metrics", "MetricsThrottle", "read_metrics", "sum_metrics"]

Metrics: TypeAlias = Mapping[str, float]

_PERIOD_S = 1.0
_MAX_METRICS = 64
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,63}$")


class MetricsThrottle:
    """Metrics at most once per second. Two threads may both get them, which is harmless."""

    def __init__(self, metrics: Callable[[], Metrics], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._due_s = clock()

    def __call__(self) -> Metrics | None:
        """Return the metrics if they are due."""
        now_s = self._clock()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + _PERIOD_S
        return self._metrics()


def read_metrics(header: Header) -> Metrics | None:
    """Return the peer's metrics, or None if this message carries none. Raises `WireError`."""
    metrics = header.get("metrics")
    if metrics is None:
        return None
    if not isinstance(metrics, dict) or len(metrics) > _MAX_METRICS:
        raise WireError(f"metrics must be an object of at most {_MAX_METRICS}")
    if not all(_NAME.match(name) and type(value) in (int, float) for name, value in metrics.items()):
        raise WireError("metrics must be numbers by name")
    return metrics


def sum_metrics(
    prefix: str, counted: Iterable[Metrics], *, shared: str | tuple[str, ...] | None = None
) -> dict[str, float]:
    """Add up the metrics of several servers, by prefixed name. What names that begin with `shared` count is the same
    for all servers, those behind them, and so the max is kept."""
    total: dict[str, float] = {}
    for metrics in counted:
        for name, value in metrics.items():
            known = total.get(prefix + name, 0.0)
            is_shared = shared is not None and name.startswith(shared)
            total[prefix + name] = max(known, value) if is_shared else known + value
    return total
