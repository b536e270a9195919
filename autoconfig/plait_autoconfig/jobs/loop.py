"""Runs a job: asks `plan` what comes next, claims it, has it measured and stores the result, until nothing is left.

Workers coordinate through the store alone. A claim counts if nothing has happened since what it was decided on, so no
two do the same; one whose worker has died is declared lost by the next worker that looks, and its configuration is
proposed again.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

import numpy as np

from plait_autoconfig.designers import maker_of
from plait_autoconfig.designers.base import Designer, ServiceContext
from plait_autoconfig.errors import Exhausted, JobBroken, NothingValid, OutsideSpace, TunerError
from plait_autoconfig.jobs.drift import drift_factors
from plait_autoconfig.jobs.measurer import MeasurementKind, MeasurementTask, MeasurerSource
from plait_autoconfig.jobs.past_runs import began_at, past_runs, remember
from plait_autoconfig.jobs.plan import Done, NoReference, RunMeasurement, RunSearch, Step, next_step
from plait_autoconfig.jobs.records import GONE, Claim, Record, given_up, lost_as_crash, searched_trials
from plait_autoconfig.jobs.reporting import read_state, used_seconds
from plait_autoconfig.jobs.runner import ChildRunner
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.jobs.store import LEASE_S, JobStore
from plait_autoconfig.objective import GOODPUT_PER_S
from plait_autoconfig.trial_load import expected_rate
from plait_autoconfig.values import Config, TuningSubject, cells_of, config_key, pooled

MAX_LOST = 2
"""The number of worker deaths that a configuration may cause; after one more it is itself taken to be the reason."""

_WAIT_S = 0.2
_FRESH_SEEDS = {MeasurementKind.CONFIRM: 1000, MeasurementKind.CHECK: 2000}  # arrivals that the search did not meet

EventKind: TypeAlias = Literal[
    "started", "note", "trial_started", "trial_progress", "trial_finished", "trial_lost", "ended"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """An event of a job, for observers. `number`: of the measurement, if it concerns one."""

    kind: EventKind
    text: str
    number: int | None = None


def run_job(
    store: JobStore,
    source: MeasurerSource,
    *,
    on_event: Callable[[JobEvent], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    runner: ChildRunner | None = None,
    now: Callable[[], float] = time.time,
) -> JobState:
    """Work on a job until it is done, `stop` returns True, or it is cancelled; then return its state.

    Call it again to resume, or in another process to help. `now`: seconds since 1970. `runner`: by default, a
    separate process for the measurer of `source`. Raises `JobRefused` before anything is measured, and `JobBroken`; the
    state is then "failed". A service that others use is tuned by one at a time: while another worker lives, that is
    told and nothing is changed.
    """
    worker = _JobWorker(store, on_event=on_event, stop=stop, now=now)
    with worker.joined():
        store.note(cancelled=False, failure="", done="")
        try:
            worker.run(source, runner)
        except _Stopped:
            pass
        except TunerError as error:
            store.note(failure=str(error))
            raise
    state = read_state(store, now_s=now())
    on_event(JobEvent(kind="ended", text=f"{state.phase}: {state.reason}" if state.reason else state.phase))
    return state


class _Stopped(Exception):
    """This worker is to end."""


class _JobWorker:
    """One worker's run."""

    _runner: ChildRunner
    _proposals: Proposals

    def __init__(
        self,
        store: JobStore,
        *,
        on_event: Callable[[JobEvent], None],
        stop: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._store, self._spec = store, store.spec
        self._on_event, self._stop, self._now = on_event, stop, now
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._began_s = self._joined_s = now()
        self._used_before_s = 0.0

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Work on the job while the block runs."""
        self._store.join(self._name, now_s=self._joined_s, alone=self._spec.target.is_shared)
        try:
            yield
        finally:
            self._store.leave(self._name)

    def run(self, source: MeasurerSource, runner: ChildRunner | None) -> None:
        """Measure until nothing is left to do."""
        with ExitStack() as stack:
            log = self._store.folder / "logs" / f"{self._name}.log"
            self._runner = runner or ChildRunner(source, self._spec, folder=self._store.folder, log=log)
            stack.callback(self._runner.finish)
            self._work()

    def _tick(self) -> None:
        """Say that this worker is alive; raise `_Stopped` if it is to end."""
        if self._now() - self._joined_s >= LEASE_S / 6.0:
            self._joined_s = self._now()
            self._store.join(self._name, now_s=self._joined_s)
        if self._stop() or self._store.facts().cancelled:
            raise _Stopped

    def _work(self) -> None:
        self._say("started", f"job {self._spec.name} in {self._store.folder}")
        self._used_before_s = used_seconds(
            [each for each in self._store.records() if each.status == "finished"], now_s=self._now()
        )
        # While the measurer starts, not when the first trial is due: the modules of a designer take a second or two.
        threading.Thread(target=maker_of, args=(self._spec.designer.name,), daemon=True).start()
        subject = self._runner.check(self._tick)
        # Without the costs, which are thousands of numbers that follow from the job.
        known = self._store.facts().subject or replace(subject, costs=())
        self._store.note(subject=known, exhausted="")  # the job may have changed; if not, the designer says it again
        self._proposals = self._designer(subject)
        while True:
            self._tick()
            step = self._claimed()
            if isinstance(step, Record):
                self._measure(step)
            elif isinstance(step, Done | NoReference):
                break
            elif step is not None:
                time.sleep(_WAIT_S)
        if isinstance(step, NoReference):
            raise NothingValid(step.why) if step.is_invalid else JobBroken(step.why)
        self._store.note(done=step.why)
        self._conclude(subject, step.why)

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def _designer(self, subject: TuningSubject) -> Proposals:
        records = self._store.records()
        library, warnings = past_runs(self._spec, records)
        self._store.warn(warnings)
        for sentence in warnings:
            self._say("note", sentence)
        known = {each.name: getattr(subject, each.name) for each in fields(subject)}
        designer = maker_of(self._spec.designer.name)(
            self._spec.space,
            self._spec.goal,
            seed=self._spec.seed,
            library=library,
            context=ServiceContext(**known, at=began_at(records)),
        )
        return Proposals(designer, self._spec)

    def _claimed(self) -> Record | Step | None:
        """Return the measurement that is now ours, or why there is none; None if another worker was quicker."""
        records = self._swept()
        step = self._planned(records)
        if isinstance(step, RunSearch):
            proposal = self._proposals.next(records)
            if isinstance(proposal, str):
                self._store.note(exhausted=proposal)
                step = self._planned(records)
            else:
                step = RunMeasurement(MeasurementKind.TRIAL, proposal)
        if not isinstance(step, RunMeasurement):
            return step
        claim = Claim(
            kind=step.kind,
            config=step.config,
            seed=self._seed(step.kind, step.config, records),
            worker=self._name,
            nonce=uuid.uuid4().hex[:12],
            at_s=self._now(),
            rate_per_s=step.rate_per_s,
        )
        return self._store.claim(claim, seen=records)

    def _planned(self, records: Sequence[Record]) -> Step:
        elapsed_s = self._now() - self._began_s
        used_s = max(used_seconds(records, now_s=self._now()), self._used_before_s + elapsed_s)
        return next_step(self._spec, records, used_s=used_s, exhausted=self._store.facts().exhausted)

    def _swept(self) -> tuple[Record, ...]:
        """Return the records, with claims of dead workers declared lost."""
        records = self._store.records()
        running = [record for record in records if record.status == "running" and record.claim.worker != self._name]
        present = self._store.workers(now_s=self._now()) if running else ()
        orphans = [record for record in running if record.claim.worker not in present]
        for record in orphans:
            lost = given_up(record)
            times = sum(each.lost == GONE and each.key == record.key for each in records)
            if self._store.end(lost_as_crash(lost) if times >= MAX_LOST else lost):
                self._say("trial_lost", lost.lost, record.number)
        return self._store.records() if orphans else records

    def _seed(self, kind: MeasurementKind, config: Config, records: Sequence[Record]) -> int:
        """Return the load's seed: equal for the n-th measurement of every configuration, so that they see the same
        arrivals.

        The reference always keeps the same seed: what changes in it is the host.
        """
        before = sum(each.kind is kind and each.key == config_key(config) and each.status != "lost" for each in records)
        first = self._spec.seed + _FRESH_SEEDS.get(kind, 0)
        return first if kind is MeasurementKind.REFERENCE else first + before

    # ---- doing -------------------------------------------------------------------------------------------------------

    def _measure(self, record: Record) -> None:
        shown = ", ".join(f"{name} = {value}" for name, value in record.config.items())
        try:
            self._say("trial_started", f"{record.kind}: {shown}", record.number)
            before = [each for each in self._store.records() if each.number < record.number]
            task = MeasurementTask(
                number=record.number,
                kind=record.kind,
                config=record.config,
                seed=record.claim.seed,
                limit_s=self._spec.trial_limit_s,
                folder=self._store.artefacts(record.number),
                expected_per_s=expected_per_s(self._spec, before, record.config),
                to_beat=to_beat(self._spec, before, record.kind),
                rate_per_s=record.claim.rate_per_s,
            )
            measured = self._runner.measure(
                task, lambda text: self._say("trial_progress", text, record.number), self._tick
            )
            self._spec.goal.losses(measured.outcome)
            self._spec.goal.excesses(measured.outcome)
        except BaseException as error:
            why = "it was given up" if isinstance(error, _Stopped) else str(error) or type(error).__name__
            self._store.end(replace(record, lost=why))
            self._say("trial_lost", why, record.number)
            raise
        ended = replace(record, measured=measured)
        if self._store.end(replace(ended, drift=self._drift(ended))):
            failure = measured.outcome.failure
            text = "measured" if failure is None else f"{failure.replace('_', ' ')}: {measured.outcome.detail}"
            self._say("trial_finished", text, record.number)
        else:
            self._say("trial_lost", "another worker had declared it lost", record.number)

    def _drift(self, record: Record) -> dict[str, float]:
        """Return the divisors by metric; none for what is compared with nothing."""
        if not record.kind.compares:
            return {}
        before = [each for each in self._store.records() if each.number != record.number]
        return drift_factors([*before, record], self._spec.reference)

    def _conclude(self, subject: TuningSubject, why: str) -> None:
        problem = remember(self._spec, subject, self._store.records())
        if problem:
            self._store.warn((problem,))
            self._say("note", problem)
        live = self._spec.target.live
        recommendation = read_state(self._store, now_s=self._now()).recommendation
        if live and live.leave == "best" and recommendation is not None:
            self._runner.apply(recommendation.config)
        self._say("note", why)

    def _say(self, kind: EventKind, text: str, number: int | None = None) -> None:
        self._on_event(JobEvent(kind=kind, text=text, number=number))


class Proposals:
    """One worker's designer. Workers of a job share no memory: it learns of others' measurements through records."""

    def __init__(self, designer: Designer, spec: JobSpec) -> None:
        self._designer, self._spec = designer, spec
        self._reported: set[int] = set()

    def next(self, records: Sequence[Record]) -> Config | str:
        """Return a configuration that nobody has measured or is measuring, or why the search is over. It is asked for
        until it is claimed: then the records have it."""
        self._follow([record for record in records if record.kind.compares])
        if why := self._why_stop(records):
            return why
        try:
            return self._designer.ask()
        except Exhausted as error:
            return str(error)

    def _follow(self, records: Sequence[Record]) -> None:
        """Tell the designer what has finished since, and what is being measured now, by whomever."""
        for record in records:
            trial = None if record.number in self._reported else record.trial()
            if trial is not None:
                self._reported.add(record.number)
                with suppress(OutsideSpace):  # the reference may lie outside: it says nothing about any cell
                    self._designer.tell(trial)
        self._designer.expect(record.config for record in records if record.status == "running")

    def _why_stop(self, records: Sequence[Record]) -> str:
        stop = self._spec.stop
        made = sum(record.kind is MeasurementKind.TRIAL and record.valid for record in records)
        if made < stop.least_trials or not stop.expected_gain:
            return ""
        regret = self._designer.expected_regret()
        said = f"the designer expects no more than {100.0 * regret:.2g} % to be left to gain"
        return said if regret < stop.expected_gain else ""


def to_beat(spec: JobSpec, records: Sequence[Record], kind: MeasurementKind) -> float | None:
    """Return what the metric of the only goal would be if the best feasible configuration so far were measured now.

    None for a measurement that is to be complete: a reference, or a confirmation; and while nothing is known.
    """
    if kind is not MeasurementKind.TRIAL or len(spec.goal.goals) > 1:
        return None
    best = spec.goal.best(searched_trials(records))
    if best is None:
        return None
    metric = spec.goal.goals[0].metric
    return best.outcome.metrics[metric] * drift_factors(records, spec.reference).get(metric, 1.0)


def expected_per_s(spec: JobSpec, records: Sequence[Record], config: Config) -> float:
    """Return the goodput that this configuration, or similar ones, were seen to reach; 0 if none was measured."""
    own = [record.raw for record in records if record.key == config_key(config) and record.kind.compares]
    again = pooled(each for each in own if each is not None and each.failure is None)
    if again is not None:
        return again.metrics.get(GOODPUT_PER_S, 0.0)
    seen = [
        cell
        for cell in cells_of(searched_trials(records))
        if spec.goal.feasible(cell.outcome)
        and cell.outcome.metrics.get(GOODPUT_PER_S, 0.0) > 0.0
        and spec.space.includes(cell.config)
    ]
    if not seen:
        return 0.0
    rows = spec.space.encode([config, *(cell.config for cell in seen)])
    return expected_rate(np.abs(rows[1:] - rows[0]).sum(1), [cell.outcome.metrics[GOODPUT_PER_S] for cell in seen])
