"""Which group runs the next step: the core decision of the server, as a pure function.

A group is what can share one denoiser call: equal base model, shape, as its family has it, and LoRA set to merge. An
executor that takes sets as inputs has nothing to merge, so all sets can share its calls; those whose rows have one set
may be faster. A unit that could go both ways is a candidate twice, of two groups. Between steps the compute thread
calls `choose` for the units to run next. The trade-offs:

- Staying with the live LoRA set costs nothing, another set costs a merge. A switch pays when the other group
  does more useful rows per second even after the merge is spread over the steps it is expected to stay.
- Rows of several sets make a call longer but let all share it, and need no merge: that way is taken when it does more
  rows per second than a call for one set, both as measured.
- A unit with a deadline that is about to be missed goes first (earliest deadline among those that can still be met).
- A call is only as large as pays. All that waits in a group could be cut into calls in many ways; the first call is the
  shortest whose cut, all calls together, takes hardly longer (`JOIN_SHARE`) than the best one. So where a call costs in
  proportion to its rows, requests run one after another, oldest first: as many images per second as in one batch, and
  each but the last sooner. The units that ran last go on together; a later one joins only where that saves the share.
- None starves: a step *overtakes* a waiting unit if a later arrival takes part in it and the unit does not. A unit
  is overtaken at most `overtake_limit` times; from then on only units that arrived before it may run without it.
- All this is decided among the units of one tenant, whose turn it is (`shares`). Then units of others join as guests,
  where rows per second grow by it and the call takes at most as many times longer as there are tenants: the host
  would have to wait as long for its next turn. One that has the next turn as well (`shares`: it has just come) takes
  guests only as far as they make the call longer by `GUEST_SHARE`. The call that runs when it comes is what it waits
  for: where several tenants come, a call takes at most `1 - GUEST_SHARE` of what its oldest request would take alone
  (of one step: `1 + GUEST_SHARE`, or nothing could be shared).

Symbols: rows of a unit, one or more for each image; step_s = seconds one denoiser call takes; switch_s = seconds a
merge takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.values import LoraSet

JOIN_SHARE = 0.05
"""The share of time that a larger batch, or another group than the one that runs, must save. It delays what runs, and
measured costs are a few per cent off: less would make latency worse for a gain that may not be there."""

STAY_SHARE = 0.025
"""A batch that runs is cut down when it saves less than this: half of what it takes to join, so that noise does not
make a batch grow and shrink."""

GUEST_SHARE = 0.25
"""By how much guests may lengthen the steps of a tenant that need not share yet. With the call that it found running
they delay its first request by one request of its kind at most; rows that are nearly free are still not given up."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What units must agree in to share a denoiser call: `shape` and `row` are their `RequestSize`'s, `loras` is the
    set that must be merged into the weights.

    `row_wise`: rows of several sets, each an input of the call, which may be slower than a call for one set. `shared`:
    the one set that all rows have and that needs no merge.
    """

    shape: Hashable
    row: RowKind
    loras: LoraSet
    row_wise: bool = False
    shared: LoraSet = ()
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A unit that could take part in the next step, in one way. `order` is unique by key and grows with arrival.

    `steps`: of its whole request. `deadline_s` is on the same clock as `now_s` of `choose`; None means no deadline.
    """

    order: int
    key: GroupKey
    rows: int
    steps_left: int
    steps: int = 0
    overtaken: int = 0
    deadline_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs in seconds: of a step by group and rows, of making a group's LoRA set live (0 for the live
    one)."""

    step_s: Callable[[GroupKey, int], float]
    switch_s: Callable[[GroupKey], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """At most `largest_batch` rows per call (a bigger unit runs alone); the module docstring explains `overtake_limit`.

    `urgent_factor`: a deadline is urgent when less than this many times the unit's remaining work is left before it.
    `is_shared`: several tenants come.
    """

    largest_batch: int
    overtake_limit: int
    is_shared: bool = False
    urgent_factor: float = 2.0


def choose(
    candidates: Sequence[Candidate],
    *,
    costs: Costs,
    limits: BatchLimits,
    now_s: float,
    running: Collection[int] = (),
    turn: str | None = None,
    credit_s: float = 0.0,
) -> tuple[Candidate, ...]:
    """Return the units of the next step, in arrival order; empty iff `candidates` is. They share one `GroupKey`.

    `running` has the orders of the units of the last step. `turn`: the tenant whose turn it is, one that has a
    candidate; None: all are of one tenant. `credit_s`: the compute-seconds that it may use before it shares.
    """
    if not candidates:
        return ()
    choice = _Choice(costs=costs, limits=limits, now_s=now_s, running=running)
    hosts = [unit for unit in candidates if turn is None or unit.tenant == turn]
    batch = choice.of_one_tenant(hosts)
    if len(hosts) == len(candidates):
        return batch
    alone_s = costs.step_s(batch[0].key, _rows(batch))
    tenants = len({unit.tenant for unit in candidates})
    longest_s = (1.0 + GUEST_SHARE if credit_s >= alone_s else tenants) * alone_s
    guests = [unit for unit in candidates if unit.tenant != turn]
    return choice.with_guests(batch, guests, min(longest_s, choice.longest_call_s(batch[0])))


def overtaken_by(
    batch: Sequence[Candidate], candidates: Sequence[Candidate], turn: str | None = None
) -> frozenset[int]:
    """Return the orders of the candidates that a step of `batch` overtakes: those of the tenant whose turn it was."""
    chosen = {unit.order for unit in batch if turn is None or unit.tenant == turn}
    latest = max(chosen, default=-1)
    own = {unit.order for unit in candidates if turn is None or unit.tenant == turn}
    return frozenset(order for order in own - chosen if order < latest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What one choice is made by: the arguments of `choose`."""

    costs: Costs
    limits: BatchLimits
    now_s: float
    running: Collection[int]

    def of_one_tenant(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return the batch that does the most rows per second, of those with a unit that must go now if there is one:
        one that was overtaken as often as may be, the oldest, or else the most urgent."""
        units = sorted(candidates, key=lambda unit: unit.order)
        first = next((unit for unit in units if self._is_due(unit)), None)
        if first is None:
            units = self._as_they_join(units)
            first = self._most_urgent(units)
        seeds: dict[GroupKey, Candidate] = {}
        for unit in units:
            if first is None or unit.order == first.order:
                seeds.setdefault(unit.key, unit)
        batches = [self._batch_that_pays(seed, units) for seed in seeds.values()]
        return max(batches, key=lambda batch: (self._worth(batch), -batch[0].order))

    def with_guests(
        self, batch: Sequence[Candidate], guests: Sequence[Candidate], longest_s: float
    ) -> tuple[Candidate, ...]:
        """Return `batch` with those guests, units of other tenants, that pay, in a call of at most `longest_s`."""
        key, rows = batch[0].key, _rows(batch)
        chosen, best = tuple(batch), (1.0 + JOIN_SHARE) * rows / max(self.costs.step_s(key, rows), 1e-9)
        joined = list(batch)
        for guest in self._as_they_join(guests):
            if guest.key != key or rows + guest.rows > self.limits.largest_batch:
                continue
            joined.append(guest)
            rows += guest.rows
            step_s = self.costs.step_s(key, rows)
            if step_s <= longest_s and rows / max(step_s, 1e-9) > best:
                chosen, best = tuple(joined), rows / max(step_s, 1e-9)
        return tuple(sorted(chosen, key=lambda unit: unit.order))

    def longest_call_s(self, seed: Candidate) -> float:
        """Return how long a call with `seed` may take."""
        if not self.limits.is_shared:
            return math.inf
        share = max(1.0 + GUEST_SHARE, (1.0 - GUEST_SHARE) * seed.steps)
        return share * self.costs.step_s(seed.key, seed.rows)

    def _is_due(self, unit: Candidate) -> bool:
        return unit.overtaken >= self.limits.overtake_limit

    def _as_they_join(self, units: Iterable[Candidate]) -> list[Candidate]:
        """Return units in the order in which they may join: those that ran last, then by arrival."""
        return sorted(units, key=lambda unit: (unit.order not in self.running, unit.order))

    def _most_urgent(self, units: Sequence[Candidate]) -> Candidate | None:
        """Return the unit with the earliest deadline among those that are short of time but can still meet it."""
        short: list[tuple[float, int, Candidate]] = []
        for unit in units:
            if unit.deadline_s is not None:
                left_s = unit.deadline_s - self.now_s
                step_s = self.costs.step_s(unit.key, unit.rows)
                need_s = self.costs.switch_s(unit.key) + unit.steps_left * step_s
                if need_s <= left_s <= self.limits.urgent_factor * need_s:
                    short.append((unit.deadline_s, unit.order, unit))
        return min(short, key=itemgetter(0, 1))[2] if short else None

    def _batch_that_pays(self, seed: Candidate, units: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return `seed` and those units of its group, taken in the order of `units`, that pay."""
        reach = self._in_reach(seed, units)
        due = [unit.order for unit in units if self._is_due(unit)]
        cuts = _first_calls([unit.rows for unit in reach], lambda rows: self.costs.step_s(seed.key, rows))
        lawful = [cut for cut in cuts if _overtakes_none_of(due, reach[: cut.units])]
        ran = [unit.order in self.running for unit in reach]
        runs = next((cut for cut in reversed(lawful) if all(ran[: cut.units])), None)
        if runs is not None and runs.pays(JOIN_SHARE):
            chosen = next((cut for cut in lawful if cut.units < runs.units and cut.pays(STAY_SHARE)), runs)
        else:
            fastest = min(lawful, key=lambda cut: cut.loss)
            chosen = next((cut for cut in lawful if cut.pays(JOIN_SHARE)), fastest)
        return tuple(sorted(reach[: chosen.units], key=lambda unit: unit.order))

    def _in_reach(self, seed: Candidate, units: Sequence[Candidate]) -> list[Candidate]:
        """Return `seed` and those of its group that fit into a call with it, in the order of `units`."""
        reach, rows, longest_s = [seed], seed.rows, self.longest_call_s(seed)
        for mate in units:
            if mate.key != seed.key or mate.order == seed.order or rows + mate.rows > self.limits.largest_batch:
                continue
            if longest_s == math.inf or self.costs.step_s(seed.key, rows + mate.rows) <= longest_s:
                reach.append(mate)
                rows += mate.rows
        return reach

    def _worth(self, batch: Sequence[Candidate]) -> float:
        """Return the useful rows per second of running `batch`, its merge spread over the steps it will stay; another
        batch than the one that runs must beat it by `JOIN_SHARE`."""
        key = batch[0].key
        stay_steps = max(1, *(unit.steps_left for unit in batch))
        step_s = self.costs.step_s(key, _rows(batch)) + self.costs.switch_s(key) / stay_steps
        stays = any(unit.order in self.running for unit in batch)
        return (1.0 + JOIN_SHARE if stays else 1.0) * _rows(batch) / max(step_s, 1e-9)


def _overtakes_none_of(due: Sequence[int], batch: Sequence[Candidate]) -> bool:
    """Return whether no due unit is left out by younger ones than itself.

    The first of `batch` may always run: if any is due, it is the oldest of them.
    """
    inside = {unit.order for unit in batch}
    youngest_mate = max((unit.order for unit in batch[1:]), default=-1)
    return all(order in inside or youngest_mate < order for order in due)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstCall:
    """One way to begin: the first `units` units in one call, the rest cut in the best way.

    `loss`: how much longer all calls then take than with the best beginning, as a share. `speed`: rows per second of
    this call, as a share of those of the best cut. Both are shares of the whole, which is what is known to a few per
    cent: a small call is too small a part of it to be judged by a difference.
    """

    units: int
    loss: float
    speed: float

    def pays(self, share: float) -> bool:
        """Return whether it wastes no more than the share of the time, and is not the small rest of a better call."""
        return self.loss <= share and (1.0 + share) * self.speed >= 1.0


def _first_calls(rows: Sequence[int], step_s: Callable[[int], float]) -> list[_FirstCall]:
    """Return all ways to begin, the shortest call first."""
    count = len(rows)
    ends = [0, *accumulate(rows)]
    seconds = {r: step_s(r) for r in {ends[j] - ends[i] for i in range(count) for j in range(i + 1, count + 1)}}
    best_s = [0.0] * (count + 1)  # best_s[i]: the units from i on, cut in the best way
    for i in reversed(range(count)):
        best_s[i] = min(seconds[ends[j] - ends[i]] + best_s[j] for j in range(i + 1, count + 1))
    all_s = max(best_s[0], 1e-9)
    return [
        _FirstCall(
            units=j,
            loss=(seconds[ends[j]] + best_s[j]) / all_s - 1.0,
            speed=ends[j] / ends[count] * all_s / max(seconds[ends[j]], 1e-9),
        )
        for j in range(1, count + 1)
    ]


def _rows(batch: Sequence[Candidate]) -> int:
    return sum(unit.rows for unit in batch)
