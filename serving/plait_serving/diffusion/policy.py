"""Which group runs the next step: the core decision of the server, as a pure function.

A group is what can share one denoiser call: equal shape, guidance on or off, and LoRA set to merge (an executor that
takes sets as inputs has nothing to merge, so all sets share its calls). Between steps the compute
thread calls `choose` for the units to run next. The trade-offs:

- Staying with the live LoRA set costs nothing, another set costs a merge. A switch pays when the other group
  does more useful rows per second even after the merge is spread over the steps it is expected to stay.
- A unit with a deadline that is about to be missed goes first (earliest deadline among those that can still be met).
- None starves: a step *overtakes* a waiting unit if a later arrival takes part in it and the unit does not. A unit
  is overtaken at most `overtake_limit` times; from then on only units that arrived before it may run without it.

Symbols: rows = images of a unit; step_s = seconds one denoiser call takes; switch_s = seconds a merge takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait_serving.diffusion.values import LoraSet


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What units must agree in to share a denoiser call. `loras` is the set that must be merged into the weights."""

    width: int
    height: int
    uses_cfg: bool
    loras: LoraSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A unit that could take part in the next step. `order` is unique and grows with arrival.

    `deadline_s` is on the same clock as `now_s` of `choose`; None means no deadline.
    """

    order: int
    key: GroupKey
    rows: int
    steps_left: int
    overtaken: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs in seconds: of a step by group and rows, of making a LoRA set live (0 for the live one)."""

    step_s: Callable[[GroupKey, int], float]
    switch_s: Callable[[LoraSet], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """At most `largest_batch` rows per call (a bigger unit runs alone); the module docstring explains `overtake_limit`.

    `urgent_factor`: a deadline is urgent when less than this many times the unit's remaining work is left before it.
    """

    largest_batch: int
    overtake_limit: int
    urgent_factor: float = 2.0


def choose(
    candidates: Sequence[Candidate], *, costs: Costs, limits: BatchLimits, now_s: float
) -> tuple[Candidate, ...]:
    """Return the units of the next step, in arrival order; empty iff `candidates` is. They share one `GroupKey`."""
    if not candidates:
        return ()
    units = sorted(candidates, key=lambda unit: unit.order)
    due = [unit for unit in units if unit.overtaken >= limits.overtake_limit]
    if due:
        return _with_mates(due[0], units, limits)
    urgent = _most_urgent(units, costs, limits, now_s)
    if urgent is not None:
        return _with_mates(urgent, units, limits)
    groups: dict[GroupKey, list[Candidate]] = defaultdict(list)
    for unit in units:
        groups[unit.key].append(unit)
    batches = [_with_mates(members[0], units, limits) for members in groups.values()]
    return max(batches, key=lambda batch: (_rows_per_second(batch, costs), -batch[0].order))


def overtaken_by(batch: Sequence[Candidate], candidates: Sequence[Candidate]) -> frozenset[int]:
    """Return the orders of the candidates that a step of `batch` overtakes."""
    chosen = {unit.order for unit in batch}
    latest = max(chosen, default=-1)
    return frozenset(unit.order for unit in candidates if unit.order not in chosen and unit.order < latest)


def _with_mates(seed: Candidate, units: Sequence[Candidate], limits: BatchLimits) -> tuple[Candidate, ...]:
    """Return `seed` and as many units of its group as fit, oldest first, so that no due unit outside is overtaken."""
    mates = [unit for unit in units if unit.key == seed.key and unit.order != seed.order]
    batch, rows = [seed], seed.rows
    for mate in mates:
        if rows + mate.rows <= limits.largest_batch:
            batch.append(mate)
            rows += mate.rows
    inside = {unit.order for unit in batch}
    due_outside = [unit.order for unit in units if unit.overtaken >= limits.overtake_limit and unit.order not in inside]
    if due_outside:
        # A due unit may only be passed by units older than itself. When `seed` is the oldest due unit it is older
        # than every due unit outside, so it always stays.
        batch = [unit for unit in batch if unit.order < min(due_outside) or unit.order == seed.order]
    return tuple(sorted(batch, key=lambda unit: unit.order))


def _most_urgent(units: Sequence[Candidate], costs: Costs, limits: BatchLimits, now_s: float) -> Candidate | None:
    """Return the unit with the earliest deadline among those that are short of time but can still meet it, or None."""

    def left_and_need(unit: Candidate) -> tuple[float, float]:
        assert unit.deadline_s is not None
        need_s = costs.switch_s(unit.key.loras) + unit.steps_left * costs.step_s(unit.key, unit.rows)
        return unit.deadline_s - now_s, need_s

    short = []
    for unit in units:
        if unit.deadline_s is not None:
            left_s, need_s = left_and_need(unit)
            if need_s <= left_s <= limits.urgent_factor * need_s:
                short.append(unit)
    return min(short, key=lambda unit: (unit.deadline_s or 0.0, unit.order), default=None)


def _rows_per_second(batch: Sequence[Candidate], costs: Costs) -> float:
    """Return the useful rows per second of running `batch`, its merge spread over the steps it will stay."""
    key = batch[0].key
    rows = sum(unit.rows for unit in batch)
    stay_steps = max(unit.steps_left for unit in batch)
    step_s = costs.step_s(key, rows) + costs.switch_s(key.loras) / max(1, stay_steps)
    return rows / max(step_s, 1e-9)
