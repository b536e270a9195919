"""An `ImageService` over an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest
from plait_serving.health import Health
from plait_serving.images.service import Catalog
from plait_serving.replica_metrics import ReplicaMetrics

if TYPE_CHECKING:
    from plait_serving.diffusion.engine import Engine


class LocalImageService:
    """An `ImageService` that makes all calls into the engine, none of them on the event loop's thread.

    `catalog` and `counted` are plain functions that may read files; they run in threads too. The composition
    root calls `warmed_up` once its warm-up image was made.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        catalog: Callable[[], Catalog],
        counted: Callable[[], ReplicaMetrics],
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._counted = counted
        self._warmup_s: float | None = None

    def warmed_up(self, seconds: float) -> None:
        """Record that a warm-up image was made in `seconds`; from now on the service is ready while the engine is
        alive."""
        self._warmup_s = seconds

    async def catalog(self, *, anew: bool = False) -> Catalog:  # noqa: ARG002  # it is always
        """Call `catalog` in a thread."""
        return await asyncio.to_thread(self._catalog)

    async def health(self) -> Health:
        """Report ready once warmed up and while the engine is alive."""
        if self._warmup_s is None:
            return Health(ready=False, reason="the warm-up image is not made yet")
        if not self._engine.alive:
            return Health(ready=False, reason="the engine has stopped", warmup_s=self._warmup_s)
        return Health(ready=True, warmup_s=self._warmup_s)

    async def counts(self) -> Sequence[ReplicaMetrics]:
        """Call `counted` in a thread."""
        return [await asyncio.to_thread(self._counted)]

    async def rest(self, model: str, *, asleep: bool) -> None:
        """Tell the engine."""
        await asyncio.to_thread(self._engine.rest, model, asleep=asleep)

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Submit the request to the engine and yield its events."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:
                # The reader's loop has ended since (a command that was interrupted): nobody is left to tell.
                if not loop.is_closed():
                    raise

        # A submit that has begun cannot be called back: the shield lets it end, so that what cancels it is never lost.
        submitting = asyncio.ensure_future(asyncio.to_thread(self._engine.submit, request, sink))
        try:
            cancel = await asyncio.shield(submitting)
        except EngineError as error:
            yield Failed(error=error)
            return
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel)
            raise
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            if not ended:
                cancel()


def _cancel(submitting: asyncio.Future[Callable[[], None]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result()()
