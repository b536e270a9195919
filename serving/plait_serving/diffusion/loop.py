"""The compute thread's loop: take in jobs, drop the lost ones, choose a group, run one step of it."""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import torch

from plait_kernels.devices import is_out_of_memory
from plait_kernels.executors.graphs import capture_waiting, give_up
from plait_kernels.heartbeat import ThreadHeartbeat
from plait_kernels.threads import set_threads
from plait_serving.diffusion.decoding import DecodeQueue
from plait_serving.diffusion.errors import Cancelled, DeadlineMissed, EngineError, EngineStopped, OutOfMemory
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.models.pool import ModelPool
from plait_serving.diffusion.queue.policy import BatchLimits, Candidate, Costs, GroupKey, choose, overtaken_by
from plait_serving.diffusion.queue.shares import TenantShares, Turn
from plait_serving.diffusion.request_registry import RequestRegistry, result_of
from plait_serving.diffusion.stepper import Outcome
from plait_serving.diffusion.units import ImageJob, RequestPhase, Unit, cut_into_units, heads
from plait_serving.diffusion.values import Edit, Failed, Finished, Preview, Progress, RgbImage

_log = logging.getLogger(__name__)

Decode: TypeAlias = Callable[[torch.Tensor, Edit | None], tuple[tuple[RgbImage, ...], tuple[bool, ...]]]
"""Latents to images with their safety flags."""

# A job is given up before its deadline only if even this share of the expected time would be too late: the
# estimate is an average of a noisy quantity.
SURELY_LATE = 0.8
# How long prompts are encoded before other requests step, end or miss their deadlines.
_ENCODE_SLICE_S = 0.25
# Changing the merged set for another tenant's turn takes at most this share of the time.
_SWITCH_SHARE = 0.2
# The credit of a tenant that comes back, in requests: forecasts are some per cent off, and one that ends before the
# request does costs it a whole step of the others.
_CREDIT = 1.25
# How often deadlines and cancellations are looked at while nothing can run.
_IDLE_POLL_S = 0.05


class DenoiseLoop:
    """Owns the jobs between admission and decoding. `run` is the compute thread's body."""

    def __init__(
        self,
        *,
        registry: RequestRegistry,
        pool: ModelPool,
        knobs: Callable[[], EngineKnobs],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._pool = pool
        self._decodes = DecodeQueue(clock)
        self._shares = TenantShares()
        self._knobs = knobs
        self._clock = clock
        self.heartbeat = ThreadHeartbeat(clock)
        self._between_steps: deque[Callable[[], None]] = deque()
        self._jobs: list[ImageJob] = []
        self._orders = {True: count(), False: count(1 << 40)}  # what is tried again came before what is not
        self._running: frozenset[int] = frozenset()
        self._costs = Costs(step_s=self._step_s, switch_s=self._switch_s)

    def check_progress(self) -> None:
        """Raise `Stuck` if this or the decode thread hangs."""
        self.heartbeat.check()
        self._decodes.heartbeat.check()

    def between_steps(self, function: Callable[[], None]) -> None:
        """Call `function` on the compute thread between two steps. From any thread."""
        self._between_steps.append(function)
        self._registry.wake()

    def run(self) -> None:
        """Run until the registry shuts down; whatever is left then fails with `EngineStopped`."""
        threads = None
        try:
            with torch.inference_mode():
                while not self._registry.shut:
                    knobs = self._knobs()
                    if knobs.threads != threads:
                        threads = knobs.threads
                        set_threads(threads)
                    self._iterate(knobs)
        except BaseException:
            # Nobody joins this thread for its result: the desk's shutting is how the others learn of it.
            _log.exception("the compute thread died")
        finally:
            self._registry.shut_down()
            self._take_in(self._knobs())
            for job in list(self._jobs):
                self._fail(job, EngineStopped("the engine stopped before the request was finished"))
            self._decodes.close()

    def _iterate(self, knobs: EngineKnobs) -> None:
        """Decode, or run one step of one group, or wait briefly."""
        self.heartbeat.begin("the work between two steps")
        self._run_between_steps()
        self._take_in(knobs)
        self._drop_lost()
        self._pool.share_loras(self._jobs)
        self._tend_models()
        if self._decodes.run_next():
            return
        batch, key = self._choose(knobs)
        if key is not None:
            self._run_batch(batch, key)
        elif self._jobs or not capture_waiting():
            self.heartbeat.rest()
            wait_s = min(_IDLE_POLL_S, knobs.batch_wait_ms / 1000 or _IDLE_POLL_S)
            self._registry.wait_for_news(wait_s if self._jobs else self._pool.rest_s)

    def _run_between_steps(self) -> None:
        while self._between_steps:
            function = self._between_steps.popleft()
            try:
                function()
            except Exception:
                _log.exception("what was to be done between two steps failed; the engine goes on")

    def _take_in(self, knobs: EngineKnobs) -> None:
        for job in self._registry.take_in():
            job.units = cut_into_units(job, knobs.largest_batch, self._orders[job.request.tried_again_s is not None])
            insort(self._jobs, job, key=lambda job: job.units[0].order)

    def _tend_models(self) -> None:
        for name, error in self._pool.tend(self._jobs).items():
            for job in [job for job in self._jobs if job.request.model == name]:
                self._fail(job, error)

    def _drop_lost(self) -> None:
        """End the jobs that were cancelled, ran out of time, or whose LoRA set could not be loaded."""
        now_s = self._clock()
        for job in list(self._jobs):
            load_error = job.load_error
            if job.cancelled:
                self._fail(job, Cancelled("the request was cancelled"))
            elif load_error is not None:
                self._fail(job, load_error)
            elif job.deadline_at_s is not None and now_s + self._min_left_s(job) > job.deadline_at_s:
                done = f"{job.steps_done} of {job.request.run_steps} steps were done"
                self._fail(job, DeadlineMissed(f"the deadline cannot be met; {done}", param="deadline_ms"))

    def _choose(self, knobs: EngineKnobs) -> tuple[list[Unit], GroupKey | None]:
        """Return the units of the next step and their group, or none. What executors take may change with a knob: the
        answer that formed the group is the one that its step uses."""
        jobs = [job for job in self._jobs if self._pool.may_run(job)]
        ready, behind = heads(jobs, largest_batch=knobs.largest_batch, overtake_limit=knobs.overtake_limit)
        if not ready or self._should_wait_for_mates(ready, knobs):
            return [], None
        units = {unit.order: unit for unit in ready}
        candidates = self._candidates(ready)
        turn = self._turn(ready, candidates)
        limits = BatchLimits(
            largest_batch=knobs.largest_batch, overtake_limit=knobs.overtake_limit, is_shared=self._shares.is_shared
        )
        batch = choose(
            candidates,
            costs=self._costs,
            limits=limits,
            now_s=self._clock(),
            running=self._running,
            turn=turn.tenant,
            credit_s=turn.credit_s,
        )
        self._running = frozenset(candidate.order for candidate in batch)
        for order in overtaken_by(batch, candidates, turn.tenant):
            units[order].overtaken += 1
        latest = max(candidate.order for candidate in batch if candidate.tenant == turn.tenant)
        for unit in behind:
            if unit.order < latest and unit.job.request.tenant.name == turn.tenant and unit.ready:
                unit.overtaken += 1
        chosen = [units[candidate.order] for candidate in batch]
        return chosen, self._key_of(chosen, batch[0].key)

    def _model(self, job: ImageJob) -> Model:
        return self._pool.of(job.request.model)

    def _step_s(self, key: GroupKey, rows: int) -> float:
        return self._pool.of(key.model).costs.step_s(key, rows)

    def _switch_s(self, key: GroupKey) -> float:
        return self._pool.of(key.model).steps.denoiser.merger.switch_cost_s(key.loras)

    def _candidates(self, ready: list[Unit]) -> list[Candidate]:
        """Return the units as candidates, twice where they could share calls by taking their sets as inputs. While all
        have one set, nothing could be gained by that: their next steps are as fast as any."""
        found = [self._own_way(unit) for unit in ready]
        if len({(candidate.key.loras, candidate.key.shared) for candidate in found}) > 1:
            units = [unit for unit in ready if self._model(unit.job).steps.is_row_wise(unit)]
            found += [unit.candidate((), row_wise=True) for unit in units]
        return found

    def _own_way(self, unit: Unit) -> Candidate:
        """Return a unit as a candidate for calls whose rows all have its set."""
        return unit.candidate(*self._model(unit.job).steps.sets_of(unit))

    def _key_of(self, batch: Sequence[Unit], key: GroupKey) -> GroupKey:
        """Return the group that a batch is, which has rows of one set although it could have others'."""
        own = {self._own_way(unit).key for unit in batch} if key.row_wise else {key}
        return own.pop() if len(own) == 1 and not next(iter(own)).loras else key

    def _turn(self, ready: list[Unit], candidates: list[Candidate]) -> Turn:
        """Return whose turn it is. A tenant that runs goes on for so long that changing between the sets to merge takes
        a small share of the time; one that has come back has a request of its own, or a shorter one of others, ahead of
        them: of each the oldest, also one whose LoRA set waits, as a thousand steps do that made room for who came."""
        tenants = list(dict.fromkeys(unit.job.request.tenant for unit in ready))
        if len(tenants) == 1:
            return self._shares.turn(tenants)
        switch_s = max(self._switch_s(candidate.key) for candidate in candidates)
        oldest = {job.request.tenant.name: job for job in reversed(self._jobs)}
        firsts = [oldest[tenant.name] for tenant in tenants]
        credit_s = _CREDIT * min(self._model(job).forecast.longest_s(job.request, job.size) for job in firsts)
        return self._shares.turn(tenants, slack_s=switch_s / _SWITCH_SHARE, credit_s=credit_s)

    def _charge(self, job: ImageJob, seconds: float) -> None:
        """Charge a request for compute. From any thread."""
        job.spent.charged_s += seconds
        self._shares.charge(job.request.tenant, seconds)
        self._registry.use(job.request.tenant.name, compute_s=seconds)

    def _should_wait_for_mates(self, units: list[Unit], knobs: EngineKnobs) -> bool:
        """Return whether to wait for batch mates (the batch-wait knob): nothing runs yet, the batch is not full, and
        the oldest unit has not waited long enough."""
        if knobs.batch_wait_ms == 0 or any(unit.step for unit in units):
            return False
        oldest_s = min(unit.job.spent.accepted_at_s for unit in units)
        full = sum(unit.rows for unit in units) >= knobs.largest_batch
        return not full and self._clock() - oldest_s < knobs.batch_wait_ms / 1000

    def _run_batch(self, batch: list[Unit], key: GroupKey) -> None:
        model = self._pool.of(key.model)
        stepper = model.steps
        try:
            started_s = self._clock()
            switched = stepper.make_live(key.loras, batch)
            merge_s = self._clock() - started_s
            for unit in batch:
                self._charge(unit.job, merge_s / len(batch))
            until_s = self._clock() + _ENCODE_SLICE_S
            prepared = [unit for unit in batch if self._prepare(unit, until_s)]
            if not prepared:
                return
            rows = sum(unit.rows for unit in prepared)
            request, expected_s = prepared[0].job.request, model.costs.measured_s(key, rows)
            what = f"a step of {rows} rows at {request.width}x{request.height}"
            self.heartbeat.begin(what, expected_s)
            started_s = self._clock()
            outcomes = stepper.step(prepared, _wants_preview)
            seconds = self._clock() - started_s
        except Exception as error:
            for job in {unit.job for unit in batch}:
                self._fail(job, error)
            return
        model.costs.record(key, rows, seconds)
        stepper.stepped(prepared, (key.row, rows), seconds)
        images = sum(unit.images for unit in prepared)
        self._registry.count(steps=1, rows=images, lora_switches=int(switched))
        for unit in prepared:
            self._charge(unit.job, seconds * unit.rows / rows)
            if unit.job.request.tenant.counts:
                model.forecast.charged_step(unit.job.size, seconds / rows)
        took_part = {unit.job for unit in prepared}
        for job in self._jobs:
            job.runs = job in took_part
            job.spent.denoise_s += seconds if job.runs else 0.0
        self._pool.stepped(list(took_part), self._jobs, seconds)
        for unit, outcome in zip(prepared, outcomes, strict=True):
            self._take_outcome(unit, outcome)

    def _prepare(self, unit: Unit, until_s: float) -> bool:
        """Return whether the unit can take part now; if preparing fails, only its job fails."""
        job = unit.job
        if job.phase is not RequestPhase.ACTIVE:
            return False
        spent_s, model = job.spent.encode_s, self._model(job)
        try:
            ready = model.steps.prepare(unit, until_s=until_s)
        except Exception as error:
            self._fail(job, error)
            return False
        self._charge(job, job.spent.encode_s - spent_s)
        if ready and unit.step == 0 and job.request.tenant.counts:
            if not job.request.controlnets:
                model.forecast.encodes.add(1, (job.spent.encode_s - job.spent.source_s) / job.size.chunks)
            if job.request.edit is not None and unit.first_image == 0:
                model.forecast.sources.add(job.request.width * job.request.height, job.spent.source_s)
        return ready

    def _take_outcome(self, unit: Unit, outcome: Outcome) -> None:
        job = unit.job
        if job.phase is not RequestPhase.ACTIVE:
            return
        if isinstance(outcome, EngineError):
            self._fail(job, outcome)
            return
        if job.request.steps_after(unit.step) > job.request.steps_after(unit.step - 1):
            self._registry.send(job, Progress(step=job.steps_done, steps=job.request.run_steps))
        if outcome is not None:
            decode, step = self._model(job).steps.decode, job.request.steps_after(unit.step)
            preview = partial(self._preview, job, decode, job.previews_sent, step)
            self._decodes.submit(job.request.tenant.name, outcome[:1].clone(), preview)
            job.previews_sent += 1
        if all(part.step == part.steps for part in job.units):
            self._finish(job)

    def _finish(self, job: ImageJob) -> None:
        decode = self._model(job).steps.decode
        self._let_go(job)
        job.phase = RequestPhase.DECODING
        latents = torch.cat([unit.latents for unit in job.units if unit.latents is not None])
        self._decodes.submit(job.request.tenant.name, latents, partial(self._decode, job, decode))

    def _fail(self, job: ImageJob, error: Exception) -> None:
        """End a job without touching its batch mates."""
        if job.phase is RequestPhase.ACTIVE:
            self._let_go(job)
            self._end(job, error)

    def _end(self, job: ImageJob, error: Exception) -> None:
        """Tell a job's error. One that is no `EngineError` is a bug and logged as one, unless memory was short: then
        graphs give theirs up before the next step. From any thread."""
        if is_out_of_memory(error):
            self.between_steps(give_up)
            error = OutOfMemory("the request does not fit the device")
        elif not isinstance(error, EngineError):
            _log.error("request %s failed", job.request.request_id, exc_info=error)
        self._registry.close(job, Failed(error=error))

    def _let_go(self, job: ImageJob) -> None:
        for unit in job.units:
            unit.close_controls()
        job.release_loras()
        self._jobs.remove(job)

    def _min_left_s(self, job: ImageJob) -> float:
        """Return the least time that a job's remaining steps can take; 0 before anything like it was measured."""
        unit = min(job.units, key=lambda unit: unit.step)
        model = self._model(job)
        step_s = model.costs.shortest_s(unit.candidate(()).key, unit.rows)
        if not step_s:
            return 0.0
        return SURELY_LATE * ((unit.steps - unit.step) * step_s + model.forecast.decode_s(job.request))

    # The two below may run on the decode thread.

    def _decode(self, job: ImageJob, decode: Decode, latents: torch.Tensor) -> None:
        started_s = self._clock()
        try:
            if job.cancelled:
                raise Cancelled("the request was cancelled")
            images, flagged = decode(latents, job.request.edit)
        except Exception as error:
            self._end(job, error)
            return
        now_s = self._clock()
        decode_s, request = now_s - started_s, job.request
        self._charge(job, decode_s)
        if request.tenant.counts:
            self._model(job).forecast.decodes.add(request.width * request.height, decode_s / request.n)
        result = result_of(job, images, flagged, decode_s=decode_s, now_s=now_s)
        self._registry.close(job, Finished(result=result))

    def _preview(self, job: ImageJob, decode: Decode, index: int, step: int, latents: torch.Tensor) -> None:
        if job.phase is RequestPhase.FAILED or job.cancelled:
            return
        try:
            (image,), _ = decode(latents, job.request.edit)
        except Exception:
            _log.exception("request %s: a preview failed", job.request.request_id)
            return
        self._registry.send(job, Preview(index=index, step=step, image=image))


def _wants_preview(unit: Unit) -> bool:
    """Return whether a preview is due. Previews are spread evenly over the steps and show a request's first image;
    after the last step comes the image itself."""
    wanted, step = unit.job.request.partial_images, unit.step + 1
    if not wanted or unit.first_image or step == unit.steps:
        return False
    return step in {round((i + 1) * unit.steps / (wanted + 1)) for i in range(wanted)}
