"""Whether a run's numbers reflect the server. A run with any `Reason` is invalid: report it, do not trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Code = Literal["send_lag", "echo", "limit", "interrupted", "too_few", "generator", "abandoned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a run is invalid. `code`: for programs, `text`: one clause for people."""

    code: Code
    text: str


def judge(
    *,
    lag_ms: float,
    echo_ms: float,
    limit_ms: float,
    errors: Mapping[str, int],
    interrupted: bool,
    judged: int,
    limits: Sequence[str] = (),
    problems: Sequence[str] = (),
    abandoned: str = "",
) -> tuple[Reason, ...]:
    """Return why the run is invalid; empty: it is valid.

    `lag_ms`, `echo_ms`: p99s, nan where nothing was measured. `errors` by outcome name. `judged`: requests that
    count. `limits` of the generator that were met, and `problems` on its side, a sentence each. `abandoned`: why it was
    ended early on purpose.
    """
    reasons: list[Reason] = []

    def note(code: Code, text: str, *, when: bool) -> None:
        if when:
            reasons.append(Reason(code=code, text=text))

    not_sent = errors.get("not_sent", 0)
    note("interrupted", "it was interrupted", when=interrupted and not abandoned)
    note("abandoned", f"it was ended early: {abandoned}", when=bool(abandoned))
    note(
        "send_lag",
        f"requests left late: p99 send lag {lag_ms:.3g} ms, limit {limit_ms:.3g} ms"
        + ("" if limits else " (more --processes may help)"),
        when=lag_ms > limit_ms,  # false for nan
    )
    note(
        "echo",
        f"this machine was slow: the control request's p99 is {echo_ms:.3g} ms, limit {limit_ms:.3g} ms",
        when=echo_ms > limit_ms,
    )
    note("limit", "; ".join(limits) or f"{not_sent} requests were not sent", when=bool(limits) or not_sent > 0)
    note("generator", "; ".join(problems), when=bool(problems))
    note("too_few", "not one request ran to its end", when=judged == 0)
    return tuple(reasons)
