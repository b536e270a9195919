"""Registry of accepted requests: admission, events to callers and counters. The only state shared by the threads.

The queue is bounded by predicted compute-seconds (`forecast`), and by a count, which bounds memory. Each tenant has a
share of both by its weight among the tenants that have requests now, so a flood of one leaves room for the others. A
request is taken if what its tenant has there is below the bound: one request always fits.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from plait_kernels.devices import is_device_lost
from plait_serving.diffusion.errors import Cancelled, EngineStopped, Overloaded
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.units import ImageJob, RequestPhase
from plait_serving.diffusion.values import Event, Failed, Finished, ImageResult, RgbImage, Tenant, Timings

_log = logging.getLogger(__name__)

_ENDS = ("finished", "failed", "cancelled", "rejected")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Counters since the start, except `waiting`, `running` and `queued_s`, which are current values: requests, and the
    compute-seconds that they will still be charged, by forecast."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    steps: int = 0
    rows: int = 0
    lora_switches: int = 0
    waiting: int = 0
    running: int = 0
    queued_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class TenantUsage:
    """What a tenant used since the engine started, counted only when the work was done. `compute_s` includes that of
    requests that failed or were cancelled; `images` and `pixels` were delivered; `steps` are those that images took
    part in."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    images: int = 0
    pixels: int = 0
    steps: int = 0
    compute_s: float = 0.0


class RequestRegistry:
    """Thread-safe. A job enters with `admitted`, is handed to the compute thread by `take_in`, and leaves with
    `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inbox: deque[ImageJob] = deque()
        self._open: list[ImageJob] = []
        self._has_news = False
        self._counts: Counter[str] = Counter()
        self._usage: dict[str, TenantUsage] = {}
        """By tenants' names, which come from the configuration, so they are few; plait's own warm-up has none."""
        self._closed_to_new = False
        self.shut = False
        """Whether the compute thread must end (or has ended)."""

    @property
    def takes_requests(self) -> bool:
        """Whether `admitted` can succeed."""
        return not self._closed_to_new and not self.shut

    @contextmanager
    def admitted(self, job: ImageJob, knobs: EngineKnobs) -> Iterator[None]:
        """Admit a job, and hand it to the compute thread after the block, in which it begins to take what it needs and
        `open_models` has its model. Raises `EngineStopped` or `Overloaded` before; the job is not admitted, either, if
        the block raises. There is room for one that is tried again: it was admitted before."""
        tenant, is_again = job.request.tenant, job.request.tried_again_s is not None
        with self._changed:
            if not self.takes_requests:
                raise EngineStopped("the engine is shutting down")
            retry_after_s = None if is_again else wait_s(tenant, self._open, knobs)
            if retry_after_s is not None:
                self.use(tenant.name, rejected=1)
                own = [other for other in self._open if other.request.tenant.name == tenant.name]
                raise Overloaded(
                    f"{len(own)} requests with {sum(other.left_s for other in own):.0f} s of work are waiting or "
                    "running",
                    retry_after_s=max(1.0, retry_after_s),
                )
            self._open.append(job)
        try:
            yield
            with self._changed:
                if self.shut:
                    raise EngineStopped("the engine is shutting down")
                self._counts["accepted"] += 1
                self._inbox.append(job)
                self._changed.notify_all()
        except BaseException:
            with self._changed:
                self._open.remove(job)
                self._changed.notify_all()
            raise

    def take_in(self) -> list[ImageJob]:
        """Return everything that arrived since the last call."""
        with self._changed:
            arrived = list(self._inbox)
            self._inbox.clear()
            return arrived

    def wake(self) -> None:
        """Wake up `wait_for_news`, or the next one if nobody waits."""
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def wait_for_news(self, timeout_s: float | None) -> None:
        """Sleep until something arrives or `wake` is called, at most `timeout_s`."""
        with self._changed:
            if not self._inbox and not self.shut and not self._has_news:
                self._changed.wait(timeout_s)
            self._has_news = False

    def drain(self, timeout_s: float) -> None:
        """Make `admitted` raise from now on, wait at most `timeout_s` until every job has left, and shut down."""
        with self._changed:
            self._closed_to_new = True
            self._changed.wait_for(lambda: not self._open or self.shut, timeout=timeout_s)
            self.shut_down()

    def shut_down(self) -> None:
        """Make the compute thread end."""
        with self._changed:
            self.shut = True
            self._changed.notify_all()

    def count(self, **increments: int) -> None:
        """Add to the counters."""
        with self._changed:
            self._counts.update(increments)

    def use(self, tenant: str, **more: float) -> None:
        """Add to the sums of a tenant, by name."""
        with self._changed:
            usage = self._usage.setdefault(tenant, TenantUsage())
            for name, value in more.items():
                setattr(usage, name, getattr(usage, name) + value)

    def usage(self) -> dict[str, TenantUsage]:
        """Return what each tenant used. Nobody pays for the warm-up."""
        with self._changed:
            return {name: replace(usage) for name, usage in self._usage.items() if name}

    def statistics(self) -> EngineStatistics:
        """Return a snapshot."""
        with self._changed:
            running = sum(job.is_stepping for job in self._open)
            return EngineStatistics(
                **self._counts,
                **{end: sum(getattr(each, end) for each in self._usage.values()) for end in _ENDS},
                running=running,
                waiting=len(self._open) - running,
                queued_s=sum(job.left_s for job in self._open),
            )

    def open_models(self) -> frozenset[str]:
        """Return the models of all requests that have not ended."""
        with self._changed:
            return frozenset(job.request.model for job in self._open)

    def send(self, job: ImageJob, event: Event) -> None:
        """Send an event to the caller. If the sink raises, the caller is gone and the job is cancelled."""
        try:
            job.sink(event)
        except Exception:
            _log.exception("request %s: its sink failed; the request is cancelled", job.request.request_id)
            job.cancelled = True

    def close(self, job: ImageJob, event: Finished | Failed) -> None:
        """End a job, here and nowhere else: move it to its last phase, count it and notify the caller. One that ends as
        the device is lost ends the engine: its process can do nothing more."""
        if isinstance(event, Failed) and is_device_lost(event.error):
            _log.error("the device is lost, and the engine with it", exc_info=event.error)
            self.shut_down()
            event = Failed(error=EngineStopped("the device failed"))
        request, used = job.request, dict[str, float]()
        if isinstance(event, Finished):
            job.phase, outcome = RequestPhase.DONE, "finished"
            pixels = request.n * request.width * request.height
            used = {"images": request.n, "pixels": pixels, "steps": request.n * request.run_steps}
        else:
            job.phase = RequestPhase.FAILED
            outcome = "cancelled" if isinstance(event.error, Cancelled) else "failed"
        with self._changed:
            self._open.remove(job)
            self.use(request.tenant.name, **{outcome: 1}, **used)
            self._has_news = True
            self._changed.notify_all()
        self.send(job, event)


def result_of(
    job: ImageJob, images: tuple[RgbImage, ...], flagged: tuple[bool, ...], *, decode_s: float, now_s: float
) -> ImageResult:
    """Return a finished job's result; time not spent loading, merging, encoding, denoising or decoding was queueing."""
    request, spent = job.request, job.spent
    total_s = now_s - spent.accepted_at_s
    # A bounded-asynchronous set loads while the first steps run, so waiting for it is not time of its own.
    asked_at_s = spent.accepted_at_s + (request.tried_again_s or 0.0)
    waited_s = spent.loaded_at_s - asked_at_s if spent.loaded_at_s and request.lora_free_steps == 0 else 0.0
    lora_s = spent.merge_s + waited_s
    return ImageResult(
        request_id=request.request_id,
        images=images,
        seeds=request.seeds,
        flagged=flagged,
        lora_policy=request.lora_policy,
        lora_free_steps=request.lora_free_steps,
        hints=job.hints,
        timings=Timings(
            queue_s=max(0.0, total_s - lora_s - spent.encode_s - spent.denoise_s - decode_s),
            lora_s=lora_s,
            encode_s=spent.encode_s,
            denoise_s=spent.denoise_s,
            decode_s=decode_s,
            total_s=total_s,
        ),
    )


def wait_s(tenant: Tenant, queue: Sequence[ImageJob], knobs: EngineKnobs) -> float | None:
    """Return the seconds until the queue, all requests that have not ended, oldest first, has room for one more of a
    tenant; None: it has room now.

    The compute thread works off a compute-second in a second, and a tenant's own at the rate of its share.
    """
    weights = {one.request.tenant.name: one.request.tenant.weight for one in queue} | {tenant.name: tenant.weight}
    share = tenant.weight / sum(weights.values())
    own = [one for one in queue if one.request.tenant.name == tenant.name]
    seconds = knobs.queue_seconds * share
    if tenant.queued_s is not None:
        seconds = min(seconds, tenant.queued_s)
    excess_s = sum(one.left_s for one in own) - seconds
    surplus = len(own) - int(max(1.0, knobs.queue_limit * share)) + 1
    waits = [excess_s] if own and excess_s >= 0.0 else []
    if surplus > 0:
        waits.append(_until_ended_s(own, surplus))
    return max(waits) / share if waits else None


def _until_ended_s(queue: Sequence[ImageJob], count: int) -> float:
    """Return the seconds until so many have ended: those that run share the steps, and as one of them ends the next one
    joins. What began together ends together, long after the mean."""
    waiting = deque(one.left_s for one in queue if not one.runs)
    ends_s = [one.left_s for one in queue if one.runs] or [waiting.popleft()]
    heapify(ends_s)
    now_s = each_s = 0.0  # the seconds from now on, and those that each of them had
    for _ in range(count):
        end_s = heappop(ends_s)
        now_s += (end_s - each_s) * (len(ends_s) + 1)
        each_s = end_s
        if waiting:
            heappush(ends_s, each_s + waiting.popleft())
    return now_s
