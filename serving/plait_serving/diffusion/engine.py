"""The engine's API: submit, cancel, reconfigure, stop.

One compute thread runs one step of one group at a time (`loop`), so a request joins, is cancelled, times out or
gives a preview at any step boundary. On a CPU it also turns latents into images, on a GPU one decode thread does
(`decoding`); the LoRA provider loads on its own threads; the request registry is all they share. Events
reach a request's sink from engine threads, in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from plait_serving.diffusion.admission import ImageLimits, check_prompts, check_request
from plait_serving.diffusion.errors import DeadlineMissed, NotFound
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.loop import SURELY_LATE, DenoiseLoop
from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.models.pool import ModelPool
from plait_serving.diffusion.request_registry import EngineStatistics, RequestRegistry, TenantUsage
from plait_serving.diffusion.units import ImageJob, SpentSeconds
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest, ImageResult

_UNBOUNDED = 1 << 62
_OF_WARM_UP = ImageLimits(size_multiple=1, min_edge_px=1)
"""plait's own warm-up is as small as can be, whatever requests may ask for."""
_FAR, _LONG_S = 4.0, 120.0
"""So many times a model's own number of pixels, or so many seconds, get a hint."""
_NEWEST_SHARE = 0.1
"""Of the newest request in the average by which others are sent to replicas."""


class Engine:
    """The engine that the module docstring describes. `assemble.build_engine` makes the parts; call `start` before
    `submit`."""

    def __init__(
        self,
        *,
        models: Sequence[Model] = (),
        knobs: EngineKnobs,
        clock: Callable[[], float],
        memory_bytes: int | None = None,
        memory: MemoryReader | None = None,
    ) -> None:
        """Take the models, or have them added to the `pool`; the first must be resident when the engine starts.
        `memory_bytes`: what those that are resident may take, by `memory`; None: no bound, and their weights."""
        self.knobs = knobs
        """The knobs in force, which `reconfigure` changes."""
        self._clock = clock
        self._registry = RequestRegistry()
        self.pool = ModelPool(
            models,
            budget_bytes=_UNBOUNDED if memory_bytes is None else memory_bytes,
            host_lora_bytes=knobs.host_lora_bytes,
            clock=clock,
            wake=self._registry.wake,
            open_models=self._registry.open_models,
            memory=MemoryReader() if memory is None else memory,
        )
        """The models, and which of them are in memory."""
        self._loop = DenoiseLoop(registry=self._registry, pool=self.pool, knobs=lambda: self.knobs, clock=clock)
        self._compute = threading.Thread(target=self._loop.run, name="plait-compute", daemon=True)

    def start(self) -> None:
        """Start the compute thread. Call once."""
        self._compute.start()

    @property
    def alive(self) -> bool:
        """Whether the compute thread runs and takes requests."""
        return self._compute.is_alive() and self._registry.takes_requests

    def check_progress(self) -> None:
        """Raise `Stuck` if the compute or the decode thread hangs. Call every few seconds."""
        self._loop.check_progress()

    def rest(self, name: str, *, asleep: bool) -> None:
        """Let a model's weights leave memory once its requests have ended, until it is asked for or woken; or bring
        them back. Returns at once. Raises `NotFound`, or `ModelError` for one that is too large for memory."""
        model = self._find(name)
        if not asleep:
            self.pool.check(model)
        self.between_steps(lambda: self.pool.rest(model, asleep=asleep))

    def submit(self, request: ImageRequest, sink: Callable[[Event], None]) -> Callable[[], None]:
        """Accept a request and start loading its LoRA set. Return what cancels it at the next step boundary, as often
        as it is called: its sink then gets `Failed(Cancelled)`.

        `sink` gets the events from engine threads, `Finished` or `Failed` last; it must not block. Raises
        `RequestError`, `NotFound`, `Overloaded`, `DeadlineMissed` or `EngineStopped`; then nothing was started.
        """
        now_s = self._clock()
        model = self._find(request.model) if request.model else self.pool.first
        request = model.family.terms.settled(request if request.model else replace(request, model=model.name))
        limits = model.limits if request.tenant.counts else _OF_WARM_UP
        check_request(request, limits, loras=model.loras, controlnets=model.controlnets, terms=model.family.terms)
        self.pool.check(model)
        size = model.family.measure(request)
        check_prompts(size, limits)
        alone_s = model.forecast.alone_s(request, size)
        arrived_s = now_s - (request.tried_again_s or 0.0)
        deadline_at_s = None if request.deadline_s is None else arrived_s + request.deadline_s
        if deadline_at_s is not None and now_s + SURELY_LATE * alone_s > deadline_at_s:
            self._registry.use(request.tenant.name, rejected=1)
            raise DeadlineMissed(f"{request.run_steps} steps take about {alone_s:.2f} s", param="deadline_ms")
        job = ImageJob(
            request=request,
            size=size,
            sink=sink,
            spent=SpentSeconds(accepted_at_s=arrived_s),
            loras=None,
            deadline_at_s=deadline_at_s,
            work_s=model.forecast.work_s(request, size),
            hints=_hints(model, request, model.forecast.guess_s(request, size)),
        )
        with self._registry.admitted(job, self.knobs):
            _served(model, model.name)  # again: from now on it stays until the job has ended
            if request.loras:  # not before: who is refused has read nothing, and taken nobody's room
                job.loras = model.loras.acquire([lora.name for lora in request.loras], request.tenant)
                job.loras.add_done_callback(lambda _: self._loaded(job))
        usual_s = job.work_s if model.usual_s is None else model.usual_s
        model.usual_s = usual_s + _NEWEST_SHARE * (job.work_s - usual_s)

        def cancel() -> None:
            job.cancelled = True
            self._registry.wake()

        return cancel

    def generate(self, request: ImageRequest, *, timeout_s: float | None = None) -> ImageResult:
        """Submit and wait. For scripts; servers use `submit`. Raises the request's error, or `TimeoutError`."""
        done: Future[ImageResult] = Future()

        def sink(event: Event) -> None:
            if isinstance(event, Finished):
                done.set_result(event.result)
            elif isinstance(event, Failed):
                done.set_exception(event.error)

        cancel = self.submit(request, sink)
        try:
            return done.result(timeout_s)
        except BaseException:
            cancel()
            raise

    def between_steps(self, function: Callable[[], None]) -> None:
        """Call `function` on the compute thread between two steps. From any thread."""
        self._loop.between_steps(function)

    def reconfigure(self, knobs: EngineKnobs) -> None:
        """Apply new knobs at the next step boundary; running requests continue."""
        self.pool.reconfigure(knobs.host_lora_bytes)
        self.knobs = knobs
        self._registry.wake()

    @property
    def is_idle(self) -> bool:
        """Whether it has no request."""
        return not self._registry.open_models()

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the counters."""
        return self._registry.statistics()

    def open_models(self) -> frozenset[str]:
        """Return the models of all requests that have not ended."""
        return self._registry.open_models()

    def request_s(self) -> dict[str, float]:
        """Return the compute-seconds of a usual request of each model that was asked for."""
        return {name: it.usual_s for name, it in self.pool.models.items() if it.usual_s is not None}

    def usage(self) -> dict[str, TenantUsage]:
        """Return what each tenant used since the start."""
        return self._registry.usage()

    def stop(self, *, drain_s: float) -> None:
        """Refuse new requests, give the accepted ones `drain_s` seconds, then fail the rest. Idempotent."""
        self._registry.drain(drain_s if self._compute.is_alive() else 0.0)
        if self._compute.is_alive():
            self._compute.join()
        self.pool.close()

    def _find(self, name: str) -> Model:
        return _served(self.pool.find(name), name)

    def _loaded(self, job: ImageJob) -> None:
        job.spent.loaded_at_s = self._clock()
        self._registry.wake()


def _hints(model: Model, request: ImageRequest, guess_s: float) -> tuple[str, ...]:
    """Return what may not be meant: a size far from the model's own, or minutes of work."""
    own = model.family.width, model.family.height
    is_far = not 1 / _FAR < request.width * request.height / (own[0] * own[1]) < _FAR
    if not is_far and guess_s < _LONG_S:
        return ()
    takes = (
        f"this takes about {guess_s:.{int(guess_s < 10)}f} s here" if guess_s else "how long this takes is not known"
    )
    far = f"; {model.name} was trained for {own[0]}x{own[1]}" if is_far else ""
    return (f"size: {request.width}x{request.height}, {request.run_steps} steps{far}; {takes}",)


def _served(model: Model | None, name: str) -> Model:
    """Return the model. Raises `NotFound` if it takes no requests."""
    if model is None or model.is_retired:
        raise NotFound(f"there is no model {name!r}", param="model")
    return model
