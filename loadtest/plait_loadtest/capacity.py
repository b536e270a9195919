"""The highest offered rate that holds the SLO: bracket, bisect, confirm. Pure policy; `Measure` runs the load.

A rate *holds* when a valid run shows every class's SLO with 99 % confidence (`confidence`). Every other rate is
rejected, with its reason. A run that is invalid through no fault of the server (`OWN_FAULT`) is repeated, at most
twice, where that may help (`RETRIED`), and shows that a rate does not hold only by what the server did after requests
were sent; if the generator itself cannot offer the rate, that is a bound as well, and the result says so. A host
that is slow without any load would spoil every rate, so then the search ends. A run that shows neither that the SLO
holds nor that it does not is repeated once, twice as long.

Each trial is long enough for its requests to show the SLO with `SPARE_LATE` late ones among them, and for a queue to
build up: a rate slightly above capacity only shows after several times the SLO. The rate that the search ends with
is run again, twice as long; only this fresh run carries the confidence statement, because picking the best of
several runs favours the lucky ones. If it fails, the search continues below.

If not a single request succeeds, for reasons that no lower rate removes (`MISTAKES`), the search ends at once. Low
rates take long trials: none is begun that might not end within the limit that the search states first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from plait_loadtest.confidence import CONFIDENCE, is_refuted, is_shown, requests_needed
from plait_loadtest.measure import ClassSummary, RunSummary

SPARE_LATE = 2
QUEUE_SLOS = 10.0  # a trial lasts at least so many SLO latencies: 10 % above capacity then misses by a whole SLO
RETRIED = frozenset({"send_lag", "echo", "generator"})
OWN_FAULT = RETRIED | {"limit"}  # reasons that say something about this machine, not about the server
MISTAKES = frozenset({"connect", "dns", "garbled", "http_4xx", "http_other", "check"})
"""Errors that indicate a wrong address, key or body if every request has one: an overloaded server answers some."""
_REPEATS = 2

Verdict = Literal["held", "missed", "unproven", "invalid"]
Purpose = Literal["bracket", "bisect", "confirm", "beyond"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCount:
    """The counts of one class with an SLO: `good` of `judged` requests were in time, `percentile` percent should be.
    `blamed`: those that were not in time even from the moment when they were sent."""

    name: str
    percentile: float
    latency_ms: float
    judged: int
    good: int
    blamed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The result of a run at a rate. `invalid`: codes and texts of the reasons. `unreachable`: why no rate can hold."""

    classes: tuple[ClassCount, ...]
    achieved_per_s: float
    goodput_per_s: float
    invalid: tuple[tuple[str, str], ...] = ()
    unreachable: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether the run was interrupted, so that the search should end."""
        return any(code == "interrupted" for code, _ in self.invalid)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateTrial:
    """A run and its verdict. `why`: the reason that the rate was rejected; empty if it held."""

    rate_per_s: float
    duration_s: float
    purpose: Purpose
    verdict: Verdict
    why: str
    observed: Observed

    @property
    def is_spoiled(self) -> bool:
        """Whether it says nothing about the server, and another run might."""
        return self.verdict == "invalid" and {code for code, _ in self.observed.invalid} <= RETRIED


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTarget:
    """What one class requires of a trial: its SLO and its share (0 to 1) of the requests."""

    percentile: float
    latency_ms: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySearch:
    """Where to start and when to stop. `tolerance`: the bracket's upper end over its lower end, less 1.

    `beyond`: a factor; the confirmed rate times this factor is run too, to show that it does not hold. `spare_s`: what
    a run may take beside its duration; `within_s`: what the search may take, None: `longest_s`.
    """

    needs: tuple[ClassTarget, ...]
    first_per_s: float
    min_per_s: float = 1e-3
    min_trial_s: float = 5.0
    tolerance: float = 0.05
    max_trials: int = 24
    beyond: float | None = None
    spare_s: float = 0.0
    within_s: float | None = None

    @property
    def longest_s(self) -> float:
        """The time that all trials would take at half the first rate."""
        return self.max_trials * (trial_s(self.first_per_s / 2.0, self) + self.spare_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The result of a search. `rate_per_s`: the highest rate that held and was confirmed; None: none was found.
    `statement`: a complete summary.

    `by_generator`: the limit was this machine, not the server.
    """

    rate_per_s: float | None
    confirmed: bool
    by_generator: bool
    statement: str
    trials: tuple[RateTrial, ...]


Measure = Callable[[float, float], Observed]
"""`(rate_per_s, duration_s) -> what a run at that rate observed`."""


def find_capacity(
    measure: Measure,
    search: CapacitySearch,
    *,
    say: Callable[[str], None] = lambda _: None,
    is_busy: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> Capacity:
    """Run the whole search; see the module docstring. When a run is interrupted, returns the results so far.

    `is_busy`: whether this machine is slow without any load; `clock`: seconds."""
    return _Searching(measure, search, say, is_busy, clock).run()


def trial_s(rate_per_s: float, search: CapacitySearch, *, times: float = 1.0) -> float:
    """Return the duration of a trial at a rate; see the module docstring. `times`: a factor on it."""
    enough = [
        requests_needed(need.percentile / 100.0, late=SPARE_LATE) / (need.share * rate_per_s) for need in search.needs
    ]
    queue_s = [QUEUE_SLOS * need.latency_ms / 1e3 for need in search.needs]
    # A Poisson run of n expected requests has fewer in half the cases: 5 % more make that rare.
    return times * max(search.min_trial_s, *queue_s, *(1.05 * seconds for seconds in enough))


def judge(observed: Observed) -> tuple[Verdict, str]:
    """Return whether a rate held and, if not, the reason."""
    why = []
    refuted = False
    is_own = any(code in OWN_FAULT for code, _ in observed.invalid)
    for each in observed.classes:
        late, share = each.judged - each.good, each.percentile / 100.0
        if is_shown(each.good, late, share):
            continue
        at_best = each.judged - each.blamed if is_own else each.good
        refuted |= at_best < share * each.judged or is_refuted(at_best, each.judged - at_best, share)
        seen = f"{each.good} of {each.judged} within {each.latency_ms:g} ms"
        why.append(f"{each.name}: {seen} do not show {each.percentile:g} % with {CONFIDENCE:.0%} confidence")
    texts = [text for _, text in observed.invalid]
    if refuted:
        return "missed", "; ".join([*why, *texts])
    if observed.invalid:
        return "invalid", "; ".join(texts)
    return ("unproven", "; ".join(why)) if why else ("held", "")


def observe(summary: RunSummary) -> Observed:
    """Return the part of a run's summary that the search uses."""
    return Observed(
        classes=tuple(
            ClassCount(
                name=each.name, percentile=each.slo_percentile, latency_ms=each.slo.latency_ms,
                judged=each.judged, good=each.good, blamed=each.blamed,
            )
            for each in summary.classes
            if each.slo is not None and each.slo_percentile is not None
        ),
        achieved_per_s=summary.total.achieved_per_s,
        goodput_per_s=summary.total.goodput_per_s,
        invalid=tuple((reason.code, reason.text) for reason in summary.reasons if reason.code != "too_few"),
        unreachable=_unreachable_reason(summary.total),
    )  # fmt: skip


def _unreachable_reason(total: ClassSummary) -> str:
    if total.succeeded or not total.errors or not total.errors.keys() <= MISTAKES:
        return ""
    errors = ", ".join(f"{count} {name}" for name, count in total.errors.items())
    return f"not one request succeeded ({errors}), and no lower rate would change that"


class _Ended(Exception):
    """Signals the end of the search."""


@dataclass
class _Searching:
    """A search in progress: the bracket is from the highest of `held` to `high`, the lowest that did not hold.
    `ended_by`: why it ended before it was done; empty if it was."""

    measure: Measure
    search: CapacitySearch
    say: Callable[[str], None]
    is_busy: Callable[[], bool]
    clock: Callable[[], float]
    trials: list[RateTrial] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    high: float | None = None
    ended_by: str = ""

    def __post_init__(self) -> None:
        self.within_s = self.search.longest_s if self.search.within_s is None else self.search.within_s
        self.until_s = self.clock() + self.within_s

    def run(self) -> Capacity:
        confirmed = False
        self.say(f"the search takes at most {self.within_s / 60.0:.3g} min")
        try:
            self._bracket()
            while self.held and not confirmed and self._room():
                self._bisect()
                confirmed = self._confirm()
            if confirmed and self.search.beyond is not None:
                self._try(self.held[-1] * self.search.beyond, "beyond", times=2.0)
        except _Ended:
            pass
        return self._result(confirmed=confirmed)

    def _room(self) -> bool:
        return len(self.trials) < self.search.max_trials

    def _bracket(self) -> None:
        """Double or halve the rate until one rate held and another did not."""
        rate = self.search.first_per_s
        while self._room() and rate >= self.search.min_per_s and (not self.held or self.high is None):
            if self._take(rate, "bracket"):
                rate *= 2.0
            else:
                rate /= 2.0

    def _bisect(self) -> None:
        while self._room() and self.high is not None and self.high / self.held[-1] > 1.0 + self.search.tolerance:
            self._take((self.high * self.held[-1]) ** 0.5, "bisect")

    def _confirm(self) -> bool:
        """Run again, twice as long; on failure the rate becomes the upper end and the search continues below."""
        rate = self.held[-1]
        if self._try(rate, "confirm", times=2.0).verdict == "held":
            return True
        self.high = rate
        self.held.pop()
        while not self.held and self._room() and rate >= self.search.min_per_s:
            rate *= 0.8
            self._take(rate, "bracket")
        return False

    def _take(self, rate: float, purpose: Purpose) -> bool:
        """Try a rate and move the bracket; return True if it held."""
        trial = self._try(rate, purpose)
        if trial.verdict == "held":
            self.held.append(rate)
            return True
        self.high = rate if self.high is None else min(self.high, rate)
        return False

    def _try(self, rate: float, purpose: Purpose, *, times: float = 1.0) -> RateTrial:
        trial = self._run(rate, purpose, times)
        for _ in range(_REPEATS):
            if trial.is_spoiled:
                trial = self._run(rate, purpose, times)
        if trial.is_spoiled and self.is_busy():
            self._end(f"this machine is busy without any load ({trial.why})")
        return self._run(rate, purpose, 2.0 * times) if trial.verdict == "unproven" else trial

    def _run(self, rate: float, purpose: Purpose, times: float) -> RateTrial:
        duration_s = trial_s(rate, self.search, times=times)
        if self.clock() + duration_s + self.search.spare_s > self.until_s:
            self._end(f"the {self.within_s / 60.0:.3g} min have no room for {duration_s:.0f} s at {rate:.4g}/s")
        self.say(f"{purpose}: {rate:.4g}/s for {duration_s:.0f} s")
        observed = self.measure(rate, duration_s)
        verdict, why = judge(observed)
        trial = RateTrial(
            rate_per_s=rate, duration_s=duration_s, purpose=purpose, verdict=verdict, why=why, observed=observed
        )
        self.trials.append(trial)
        self.say(f"{purpose}: {rate:.4g}/s {verdict}{': ' + why if why else ''}")
        if observed.interrupted or observed.unreachable:
            raise _Ended
        return trial

    def _end(self, why: str) -> NoReturn:
        self.ended_by = why
        raise _Ended

    def _result(self, *, confirmed: bool) -> Capacity:
        rate = self.held[-1] if self.held else None
        bound = [trial for trial in self.trials if trial.rate_per_s == self.high and trial.verdict != "held"]
        by_generator = bool(bound) and bound[-1].verdict == "invalid"
        return Capacity(
            rate_per_s=rate,
            confirmed=confirmed,
            by_generator=by_generator,
            statement=self._statement(rate, confirmed=confirmed, by_generator=by_generator),
            trials=tuple(self.trials),
        )

    def _statement(self, rate: float | None, *, confirmed: bool, by_generator: bool) -> str:
        """Return the result as a sentence or two."""
        trials, high = self.trials, self.high
        if rate is None:
            why = trials[-1].why if by_generator else trials[-1].observed.unreachable if trials else ""
            return "no rate was found that holds the SLO" + _because(self.ended_by or why)
        if not confirmed:
            held = f"{rate:.4g}/s held, but the search ended before a longer run confirmed it"
            return held + _because(self.ended_by)
        last = next(trial for trial in reversed(trials) if trial.purpose == "confirm" and trial.verdict == "held")
        shown = "; ".join(
            f"{each.name}: {each.good} of {each.judged} within {each.latency_ms:g} ms, "
            f"so {each.percentile:g} % or more are"
            for each in last.observed.classes
        )
        above = "no higher rate was tried" if high is None else f"{high:.4g}/s did not hold"
        if self.search.beyond is not None and (trials[-1].purpose != "beyond" or trials[-1].verdict == "held"):
            was = "held, too" if trials[-1].purpose == "beyond" else "was not tried" + _because(self.ended_by)
            above += f"; {rate * self.search.beyond:.4g}/s {was}"
        held = f"{rate:.4g}/s holds the SLO with {CONFIDENCE:.0%} confidence ({shown})"
        if by_generator:
            why = next(trial.why for trial in reversed(trials) if trial.rate_per_s == high)
            return f"at least {rate:.4g}/s, this generator ends there: {held}; {above}: {why}"
        return f"{held}; {above}"


def _because(why: str) -> str:
    return f": {why}" if why else ""
