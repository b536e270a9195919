"""The `ImageService` that calls the base model's deployment through a Serve handle."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from contextvars import Context
from dataclasses import fields, replace
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException, RequestCancelledError

from plait_fabric.rpc.outages import Outages
from plait_serving.deployments.handles import AllReplicas, ask_all
from plait_serving.deployments.images.catalog_pieces import Accepted, unpacked
from plait_serving.diffusion.errors import Cancelled, EngineError, EngineStopped, KillsReplicas, Overloaded
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest, Preview
from plait_serving.health import HEALTH_TIMEOUT_S, Health
from plait_serving.images.service import Catalog
from plait_serving.replica_metrics import ReplicaMetrics

_log = logging.getLogger(__name__)

CATALOG_TIMEOUT_S = 120.0
"""For the first catalog: a replica that died and is started again has the time to load a model."""

_PERIOD_S = 0.5
"""How old a catalog may be, beside what its engine took to see a change (`lora_cards`): with that, less than 2 s."""
_PATIENCE_S = 1.0
"""A call that takes longer met a replica that is busy, or gone; twice as long the next time."""

_PAUSE_S = 0.05

_REST_TIMEOUT_S = 10.0
"""A replica only takes note of it."""

ACCEPT_TIMEOUT_S = 120.0
"""As long again for a replica that dies between that answer and the request, or with it."""


class HandleImageService:
    """An `ImageService` over the base model's handle; Serve's errors become the engine's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True)
        self._engines = AllReplicas(handle)
        self._outages = Outages()
        self._suspects = FatalRequests()
        self._accepted_s = -math.inf
        self._catalog: Catalog | None = None
        self._digest = ""
        self._waiting: list[asyncio.Future[Catalog]] = []
        self._wanted = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def catalog(self, *, anew: bool = False) -> Catalog:
        """Return what an engine told last; from the first call on one is asked again and again. `anew`, or the first:
        what one tells now, one answer to all who ask together. Raises `EngineStopped` if none answers within
        `CATALOG_TIMEOUT_S`: Serve would wait for as long as there is no replica."""
        if self._following is None or self._following.done():
            # A context of its own: Serve and the log would count its questions to the request that asked first.
            self._following = asyncio.create_task(self._follow(), context=Context())
        if self._catalog is not None and not anew:
            return self._catalog
        told = asyncio.get_running_loop().create_future()
        self._waiting.append(told)
        self._wanted.set()
        try:
            return await asyncio.wait_for(told, CATALOG_TIMEOUT_S)
        except TimeoutError as error:
            raise self._none_within(CATALOG_TIMEOUT_S) from error

    async def _follow(self) -> None:
        patience_s = _PATIENCE_S
        while True:
            asked, self._waiting = self._waiting, []  # nobody gets an answer from before the question
            self._wanted.clear()
            try:
                async with asyncio.timeout(patience_s):
                    catalog = await self._look()
                patience_s = _PATIENCE_S
                for told in asked:
                    if not told.done():
                        told.set_result(catalog)
            except (TimeoutError, _ReplicaDied) as error:  # another one will tell
                if isinstance(error, TimeoutError):
                    patience_s = min(2 * patience_s, CATALOG_TIMEOUT_S)
                self._waiting += [told for told in asked if not told.done()]  # without those who left
                await asyncio.sleep(_PAUSE_S)
                continue
            except Exception as error:
                if not isinstance(error, EngineError):
                    _log.exception("an engine's catalog cannot be read")
                    error = EngineError("internal error; the server's log has the details")
                for told in asked:
                    if not told.done():
                        told.set_exception(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), _PERIOD_S)

    async def _look(self) -> Catalog:
        """Ask an engine whether its catalog is still the one that is known, and take a new one."""
        response = self._stream.catalog.remote(self._digest)
        try:
            told = [piece async for piece in response]
        except (RayError, RayServeException) as error:
            raise self._translated(error) from error
        except asyncio.CancelledError:
            response.cancel()
            raise
        if not told:
            raise self._died("the engine's replica told no catalog")
        head, *pieces = told
        self._outages.expect(head.start_s)
        self._outages.found()
        if pieces or self._catalog is None:
            self._catalog, self._digest = unpacked(pieces), head.digest
        return self._catalog

    async def _ask_health(self) -> object:
        """Ask until a replica survives the question: for a while Serve offers those that are dead beside the others."""
        while True:
            try:
                return await self._handle.health.remote()
            except (RayError, RayServeException) as error:
                if not isinstance(translated := self._translated(error), _ReplicaDied):
                    raise translated from error
            await asyncio.sleep(_PAUSE_S)  # for Serve to learn of it too

    async def rest(self, model: str, *, asleep: bool) -> None:
        """Tell every replica. One that starts later holds what it is asked for, like every other."""
        answers = await asyncio.to_thread(ask_all, self._handle, "rest", model, asleep, timeout_s=_REST_TIMEOUT_S)
        if not answers:
            raise self._none_within(_REST_TIMEOUT_S)
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._translated(answer) from answer

    async def counts(self) -> Sequence[ReplicaMetrics]:
        """Return what all replicas count. Raises `EngineStopped` if none answers."""
        engines = await self._engines.answers()
        if not engines:
            raise EngineStopped("no engine replica reports its metrics")
        return engines

    async def health(self) -> Health:
        """Return the health of a replica; if there is none or it does not answer, that is a reason and not an error."""
        try:
            health = await asyncio.wait_for(self._ask_health(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return Health(ready=False, reason=f"no engine replica answered within {HEALTH_TIMEOUT_S:g} s")
        except EngineError as error:
            return Health(ready=False, reason=error.message)
        assert isinstance(health, Health)
        return health

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of a replica. If the replica dies, try the request again: a seed gives the same image. One
        with which another replica dies, too, is refused from then on, for a while."""
        if self._suspects.is_refused(request):
            yield Failed(error=KillsReplicas("two engine replicas died with such a request; it is not tried again"))
            return
        previews = 0
        async with aclosing(self._attempts(request)) as events:
            async for event in events:
                if isinstance(event, Preview):
                    if event.index < previews:
                        continue  # the client has it from an earlier attempt
                    previews = event.index + 1
                yield event

    async def _attempts(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Make an attempt, and if its replica dies others that go before what came later, each alone, among such, until
        its first step is done. If its replica dies after that, and of one that was alone then, the request is not the
        cause and is tried again."""
        arrived_s = time.monotonic()
        async with aclosing(self._attempt(request, arrived_s)) as events:
            async for event in events:
                if _has_died(event):
                    break
                yield event
            else:
                return
        suspects, began_s, died_alone = self._suspects, time.monotonic(), 0
        died: Event | None = None
        while True:
            async with AsyncExitStack() as alone:
                await alone.enter_async_context(suspects.alone)  # waits: for those that came before, a step of each
                if died is not None and died_alone == suspects.died_alone:
                    break
                died, died_alone, is_alone = None, suspects.died_alone, True
                _log.warning("request %s: its engine replica died; once more", request.request_id)
                again = replace(request, tried_again_s=time.monotonic() - arrived_s)
                async with aclosing(self._attempt(again, began_s)) as events:
                    async for event in events:
                        if _has_died(event):
                            died = event
                            break
                        await alone.aclose()
                        is_alone = False
                        yield event
                if died is None:
                    return
                if is_alone:
                    suspects.died_alone += 1
                    break
        suspects.killed_two(request)
        yield died

    async def _attempt(self, request: ImageRequest, began_s: float) -> AsyncGenerator[Event, None]:
        """Make one attempt. Leaving early cancels the call, and with it the work. `began_s`: since when it waits for a
        replica, or for others' attempts, which wait for one as well."""
        response = self._stream.generate.remote(request)
        ended = False
        silent_s = time.monotonic() - max(began_s, self._accepted_s)
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S - silent_s):
                event = await anext(response, None)
            self._accepted_s = time.monotonic()
            while event is not None:
                ended = isinstance(event, Finished | Failed)
                if not isinstance(event, Accepted):
                    yield event
                if ended:
                    return
                event = await anext(response, None)
            ended = True
            yield Failed(error=self._died("the engine's replica ended without a result"))
        except TimeoutError:
            yield Failed(error=self._none_within(ACCEPT_TIMEOUT_S))
        except (RayError, RayServeException) as error:
            ended = True
            yield Failed(error=self._translated(error))
        finally:
            if not ended:
                response.cancel()

    def _translated(self, error: Exception) -> EngineError:
        known = translate(error)
        return self._died(known.message) if isinstance(known, _ReplicaDied) else known

    def _died(self, why: str) -> EngineError:
        self._outages.lost()
        return _ReplicaDied(why, retry_after_s=self._outages.back_in_s())

    def _none_within(self, seconds: float) -> EngineStopped:
        self._outages.lost()
        message = f"no engine replica answered within {seconds:g} s"
        return EngineStopped(message, retry_after_s=self._outages.back_in_s())


class _ReplicaDied(EngineStopped):
    """The replica that had the request died."""


def _has_died(event: Event) -> bool:
    return isinstance(event, Failed) and isinstance(event.error, _ReplicaDied)


def translate(error: Exception) -> EngineError:
    """Translate an error of Ray or Serve into an engine error for the caller."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, EngineError):
        return error.cause
    if isinstance(error, BackPressureError):
        return Overloaded("too many requests are waiting", retry_after_s=1.0)
    if isinstance(error, TaskCancelledError | RequestCancelledError):
        return Cancelled("the request was cancelled")
    if isinstance(error, DeploymentUnavailableError):
        return EngineStopped("the model could not be loaded; the server's log says why")
    if isinstance(error, RayActorError):
        return _ReplicaDied("the engine's replica died; it is started again")
    _log.error("unexpected error from the engine's deployment", exc_info=error)
    return EngineError("internal error; the engine's log has the details")


_CAPACITY = 1_024
_REFUSED_FOR_S = 600.0
"""Long enough to spare the replicas a client that repeats itself; not for ever, because a replica that died twice for
another reason leaves innocent requests here."""
_OF_ONE_ATTEMPT = frozenset({"request_id", "seed", "deadline_s", "partial_images", "tenant", "tried_again_s"})
"""Fields that say nothing of what a replica computes, or that a client leaves to us."""


class FatalRequests:
    """Requests with which replicas die: each is tried once more, alone, and not again if it was the cause.

    For one event loop.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[bytes, float] = {}
        self.alone = asyncio.Semaphore(1)
        """Held by a request that is tried again until its first step is done: two that died together do not die
        together again."""
        self.died_alone = 0
        """How many died while they held it: what died with them was not the cause."""

    def killed_two(self, request: ImageRequest) -> None:
        """Record that a second replica died with the request."""
        key = _fingerprint(request)
        self._refused.pop(key, None)
        self._refused[key] = self._clock() + _REFUSED_FOR_S
        if len(self._refused) > _CAPACITY:
            del self._refused[next(iter(self._refused))]

    def is_refused(self, request: ImageRequest) -> bool:
        """Return whether two replicas died with such a request not long ago."""
        # Nearly always there are none.
        return bool(self._refused) and self._clock() < self._refused.get(_fingerprint(request), -math.inf)


def _fingerprint(request: ImageRequest) -> bytes:
    """Return what requests have in common that make a replica compute the same, whatever their seeds."""
    said = [getattr(request, field.name) for field in fields(request) if field.name not in _OF_ONE_ATTEMPT]
    digest = hashlib.sha256(repr(said).encode("utf-8", "surrogatepass"))  # of arrays this has the corners alone
    edited = () if request.edit is None else (request.edit.image, request.edit.mask)
    for array in (*(control.image for control in request.controlnets), *edited, request.reference):
        if array is not None:
            digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
