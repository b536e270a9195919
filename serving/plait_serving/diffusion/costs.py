"""Measured step costs, from which `policy.choose` and the deadline checks estimate the near future."""

from __future__ import annotations

import threading

from plait_serving.diffusion.policy import GroupKey

# Weight of the newest measurement; about the last five steps of a kind decide.
_NEWEST = 0.2


class StepCosts:
    """Exponential averages of seconds per denoiser call, by pixels, guidance and rows. Thread-safe.

    Unseen row counts are scaled from the nearest seen one in proportion to rows, plus the fixed share that a call of
    any size costs (one half: between a launch-bound GPU and a compute-bound CPU).
    """

    def __init__(self, first_guess_s: float = 0.05) -> None:
        self._first_guess_s = first_guess_s
        self._seen: dict[tuple[int, bool], dict[int, float]] = {}
        self._lock = threading.Lock()

    def record(self, key: GroupKey, rows: int, seconds: float) -> None:
        """Record that a call of `rows` rows of a group took `seconds`."""
        with self._lock:
            kind = self._seen.setdefault(_kind(key), {})
            old = kind.get(rows)
            kind[rows] = seconds if old is None else old + _NEWEST * (seconds - old)

    def knows(self, key: GroupKey) -> bool:
        """Return whether a call of this kind was ever measured."""
        return _kind(key) in self._seen

    def step_s(self, key: GroupKey, rows: int) -> float:
        """Return the expected seconds of one call."""
        with self._lock:
            kind = self._seen.get(_kind(key))
            if not kind:
                return self._first_guess_s
            nearest = min(kind, key=lambda seen: abs(seen - rows))
            return kind[nearest] * (0.5 + 0.5 * rows / nearest)


def _kind(key: GroupKey) -> tuple[int, bool]:
    return key.width * key.height, key.uses_cfg
