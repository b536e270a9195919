"""How long to wait before calling again after nobody answered."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff: the pause doubles from `first_s` to `max_s`, which is what a replica that is back may wait
    until its clients learn of it."""

    first_s: float = 0.1
    max_s: float = 0.5

    def wait_s(self, failures: int, rng: random.Random | None = None) -> float:
        """Return the pause after `failures` (>= 1) in a row. With `rng`, up to half of it is subtracted at random, so
        that the clients of one dead server do not come back together."""
        wait_s = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return wait_s if rng is None else wait_s * (1.0 - 0.5 * rng.random())
