"""The running state of requests, which the compute thread mutates.

A request is cut into units of at most `largest_batch` images; the unit is what is scheduled. Usually there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from plait_serving.diffusion.edits import Blend, EditSource
from plait_serving.diffusion.errors import EngineStopped
from plait_serving.diffusion.lora.cache import LoraLease
from plait_serving.diffusion.protocols import ActiveControl, Conditioning, Encoding, RequestSampler
from plait_serving.diffusion.queue.policy import Candidate, GroupKey
from plait_serving.diffusion.request_terms import RequestSize
from plait_serving.diffusion.values import Event, ImageRequest, LoraSet


class RequestPhase(Enum):
    """The phase of a request."""

    ACTIVE = auto()
    DECODING = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class SpentSeconds:
    """Seconds by kind, for `Timings`. `loaded_at_s`: when the LoRA set arrived; `charged_s`: its share of the compute
    thread's time (`queue/forecast.py`); `source_s`: the part of `encode_s` in which the VAE encoded an edit's image."""

    accepted_at_s: float
    loaded_at_s: float | None = None
    merge_s: float = 0.0
    encode_s: float = 0.0
    source_s: float = 0.0
    denoise_s: float = 0.0
    charged_s: float = 0.0


@dataclass(slots=True, eq=False)
class ImageJob:
    """One accepted request, of a `size` that its family measured. `work_s`: the compute-seconds that it will be
    charged, by forecast. `hints`: what is told of it with its images. `source`: the image that it starts from, from its
    first step on. `runs`: it took part in the latest step. `given_back_at`: how many calls its tenant had made when its
    LoRA set was last given back."""

    request: ImageRequest
    size: RequestSize
    sink: Callable[[Event], None]
    spent: SpentSeconds
    loras: Future[LoraLease] | None
    deadline_at_s: float | None
    work_s: float = 0.0
    hints: tuple[str, ...] = ()
    phase: RequestPhase = RequestPhase.ACTIVE
    cancelled: bool = False
    runs: bool = False
    units: list[Unit] = field(default_factory=list)
    source: EditSource | None = None
    previews_sent: int = 0
    given_back_at: int = -1

    @property
    def steps_done(self) -> int:
        """The number of the request's steps that every unit has completed."""
        return self.request.steps_after(min(unit.step for unit in self.units))

    @property
    def has_begun(self) -> bool:
        """Whether any of its units was prepared for its first step."""
        return any(unit.sampler is not None for unit in self.units)

    @property
    def is_stepping(self) -> bool:
        """Whether it has begun to step, and has not ended."""
        return self.phase is RequestPhase.ACTIVE and any(unit.step for unit in self.units)

    @property
    def is_on_trial(self) -> bool:
        """Whether a process may have died of it, and it has not survived a step since."""
        return self.request.tried_again_s is not None and not self.request.steps_after(self.units[0].step)

    @property
    def left_s(self) -> float:
        """The compute-seconds that it will still be charged, by forecast."""
        return max(0.0, self.work_s - self.spent.charged_s)

    @property
    def load_error(self) -> Exception | None:
        """Why the LoRA set will never arrive; None if there is none, or it may still arrive, or it is loaded."""
        if self.loras is None or not self.loras.done():
            return None
        error = self.loras.exception()
        return error if error is None or isinstance(error, Exception) else EngineStopped(repr(error))

    def release_loras(self) -> None:
        """Stop waiting for the LoRA set, or release it. Idempotent."""
        if self.loras is not None and not self.loras.cancel():
            self.loras.add_done_callback(_release)

    def give_back_loras(self, calls: int, wake: Callable[[], None]) -> None:
        """Let others have the LoRA set if they wait for it, and wait for it again; `wake` is called when it came."""
        lease = self.lease
        again = lease.give_back() if lease is not None and lease.is_asked_back else None
        if again is not None:
            self.loras, self.given_back_at = again, calls
            again.add_done_callback(lambda _: wake())

    @property
    def lease(self) -> LoraLease | None:
        """The loaded LoRA set; None if there is none, or it has not arrived yet, or it failed."""
        if self.loras is None or not self.loras.done() or self.load_error is not None:
            return None
        return self.loras.result()


@dataclass(slots=True, eq=False)
class Unit:
    """Some images of a request that are denoised together, and the `rows` of a call that they are. `kind`: equal for
    units between which, before their first step, only their age decides. `sampler` and the rest are None until its
    first step; `encoding` is there while its prompts are encoded."""

    job: ImageJob
    order: int
    first_image: int
    images: int
    rows: int
    kind: Hashable = None
    step: int = 0
    overtaken: int = 0
    sampler: RequestSampler | None = None
    latents: torch.Tensor | None = None
    blend: Blend | None = None
    extra: torch.Tensor | None = None
    conditioning: Conditioning | None = None
    encoding: Encoding | None = None
    encoded_with: LoraSet = ()
    controls: tuple[ActiveControl, ...] = ()

    @property
    def steps(self) -> int:
        """The number of denoiser calls that this unit makes in all; each is a step of the engine, whichever share of a
        sampler's step it is."""
        return self.job.request.calls if self.sampler is None else len(self.sampler.timesteps)

    @property
    def loras(self) -> LoraSet:
        """The set that acts in the next step."""
        return self.job.request.loras_at(self.step)

    @property
    def ready(self) -> bool:
        """Whether the next step could run now: its LoRA set is in host memory."""
        return not self.loras or self.job.lease is not None

    def close_controls(self) -> None:
        """Close its ControlNet sessions."""
        for control in self.controls:
            control.client.close(control.session)
        self.controls = ()

    def pause(self) -> None:
        """Let go of all that belongs to the model's weights, which leave: the next step prepares it again."""
        self.encoding = None
        if self.controls:
            self.conditioning = None
        self.close_controls()

    def candidate(self, merged: LoraSet, shared: LoraSet = (), *, row_wise: bool = False) -> Candidate:
        """Return this unit as a candidate for the policy; `merged` is the set that its next step needs in the
        weights, `shared` its set if it needs no merge alone, `row_wise` whether it is an input beside others."""
        request, size = self.job.request, self.job.size
        key = GroupKey(size.shape, size.row, merged, row_wise, shared, request.model)
        return Candidate(
            order=self.order,
            key=key,
            rows=self.rows,
            steps_left=self.steps - self.step,
            steps=self.steps,
            overtaken=self.overtaken,
            deadline_s=self.job.deadline_at_s,
            tenant=request.tenant.name,
        )


def _release(loras: Future[LoraLease]) -> None:
    if not loras.cancelled() and loras.exception() is None:
        loras.result().release()


def cut_into_units(job: ImageJob, largest_batch: int, orders: Iterator[int]) -> list[Unit]:
    """Return units of at most `largest_batch` rows, or of one image, with the next orders."""
    request, size = job.request, job.size
    key = (request.tenant.name, request.model, size.shape, request.loras_at(0))
    at_once, units = max(1, largest_batch // size.rows), []
    for start in range(0, request.n, at_once):
        images = min(at_once, request.n - start)
        rows = images * size.rows
        unit = Unit(job=job, order=next(orders), first_image=start, images=images, rows=rows, kind=(*key, rows))
        units.append(unit)
    return units


def heads(jobs: Iterable[ImageJob], *, largest_batch: int, overtake_limit: int) -> tuple[list[Unit], list[Unit]]:
    """Return the units that the next step could run, and those that cannot take part as older ones of their kind fill
    any batch before them. The policy's choice does not depend on the latter, so a step costs no more the more wait.
    What is on trial runs alone, and before all others.
    """
    jobs = list(jobs)
    on_trial = next((job.units[0] for job in jobs if job.is_on_trial and job.units[0].ready), None)
    if on_trial is not None:
        return [on_trial], []
    ready: list[Unit] = []
    behind: list[Unit] = []
    rows_of: dict[Hashable, int] = {}
    for job in jobs:
        for unit in job.units:
            waits = unit.sampler is None and job.deadline_at_s is None and unit.overtaken < overtake_limit
            rows = rows_of.get(unit.kind, 0) if waits else 0
            if rows and rows + unit.rows > largest_batch:
                behind.append(unit)
            elif unit.step < unit.steps and unit.ready:
                ready.append(unit)
                if waits:
                    rows_of[unit.kind] = rows + unit.rows
    return ready, behind
