"""How confident a run makes us that a share of requests is in time: the early-stopping rule of MLPerf LoadGen.

With h requests in time and t late ones, the claim "at least a share p is in time" has confidence c when I(p - d; h,
t + 1) <= 1 - c, where I is the regularised incomplete beta function and d a tolerance (0 here): if the true share
were p or less, so few late ones would occur with a probability of at most 1 - c (mlcommons/inference, loadgen early
stopping). With none late this is p ** h <= 1 - c: 459 requests for a p99, 90 for a p95 at 99 %.
"""

from __future__ import annotations

from bisect import bisect_left

CONFIDENCE = 0.99
_MOST = 1 << 40  # requests: more than anybody has


def doubt(in_time: int, late: int, share: float) -> float:
    """Return I(p; h, t + 1), the probability of so few late ones for a true share of `share`; 1 without requests."""
    return _incomplete_beta(in_time, late + 1, share) if in_time > 0 else 1.0


def is_shown(in_time: int, late: int, share: float) -> bool:
    """Return whether the run shows, with this confidence, that at least `share` (0 to 1) of requests are in time."""
    return doubt(in_time, late, share) <= 1.0 - CONFIDENCE


def is_refuted(in_time: int, late: int, share: float) -> bool:
    """Return whether so many are late that `share` being in time is that unlikely (the same test, reversed)."""
    return late > 0 and _incomplete_beta(late, in_time + 1, 1.0 - share) <= 1.0 - CONFIDENCE


def requests_needed(share: float, *, late: int = 0) -> int:
    """Return the fewest requests that show `share` with `late` late ones among them."""
    return late + 1 + bisect_left(range(1, _MOST), True, key=lambda in_time: is_shown(in_time, late, share))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    from scipy.special import betainc  # a third of a second, which an ordinary run does not need

    return float(betainc(a, b, x))
