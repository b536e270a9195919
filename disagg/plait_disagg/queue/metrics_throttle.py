"""What workers count travels with their answers, so that the ingress can show it without asking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

__all__ = ["MetricsThrottle", "sum_metrics"]

_PERIOD_S = 1.0


class MetricsThrottle:
    """Metrics at most once a second. Two threads may both get them: no harm."""

    def __init__(
        self, metrics: Callable[[], Mapping[str, float]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._due_s = clock()

    def __call__(self) -> Mapping[str, float] | None:
        """The metrics if they are due."""
        now_s = self._clock()
        if now_s < self._due_s:
            return None
        self._due_s = now_s + _PERIOD_S
        return self._metrics()


def sum_metrics(prefix: str, said: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of several workers, by prefixed name."""
    total: dict[str, float] = {}
    for metrics in said:
        for name, value in metrics.items():
            total[prefix + name] = total.get(prefix + name, 0.0) + value
    return total
