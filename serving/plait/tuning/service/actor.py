"""The Ray actor that holds the `TuningJobQueue`, and the service that calls it. All its Ray calls are made here.

The actor is detached: it outlives the client, the request and the ingress replica. Ray restarts it when its process
dies, and it is found by its name, which is derived from the folder of the jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from plait.tuning.service.job_process import start_job
from plait.tuning.service.job_queue import JobQueueSettings, StartJob, TuningJobQueue
from plait.tuning.service.job_view import JobQueueError
from plait_serving.http.edge.errors import ApiError

_log = logging.getLogger(__name__)

_NAMESPACE = "plait"
_LONGEST_CALL_S = 60.0
_IDLE_S = 900.0
"""An actor that has been idle for this long exits; the next request starts another."""

_AFTER_ERROR_S = 10.0
"""Until the queue is looked at again: a log that grows faster fills a disk that is nearly full."""


class TuningActor:
    """The job queue and the thread that works on it."""

    def __init__(self, settings: JobQueueSettings, start: StartJob) -> None:
        logging.basicConfig(level=logging.INFO)
        self._queue = TuningJobQueue(settings, start)
        self._asked_s = time.monotonic()
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._work, name="plait-tuning", daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the job queue."""
        self._asked_s = time.monotonic()
        return getattr(self._queue, method)(*arguments)

    def _work(self) -> None:
        while time.monotonic() - self._asked_s < _IDLE_S:
            try:
                if self._queue.work_once():
                    self._asked_s = time.monotonic()
            except Exception:  # a full disk; the next round may be luckier
                _log.exception("working on a tuning job")
                time.sleep(_AFTER_ERROR_S)
            time.sleep(0.2)
        ray.kill(self._me, no_restart=True)


class ActorTuningService:
    """The service behind the routes: it calls the actor. It finds or starts that when it is created, so that jobs
    interrupted by a stop of the server continue, and again whenever the actor is lost."""

    def __init__(self, settings: Callable[[], JobQueueSettings], *, start: StartJob = start_job) -> None:
        """Take what returns the settings, which are read anew for each job."""
        self._settings, self._start = settings, start
        self._actor = self._found()

    async def submit(self, text: str, tenant: str) -> dict[str, Any]:
        """Call `TuningJobQueue.submit` in the actor. The token makes a repeated call harmless."""
        await self.call("configure", self._settings())
        return dict(await self.call("submit", text, tenant, secrets.token_hex(4)))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor, waiting while Ray restarts it; start another if it had ended. Raises `JobQueueError`, or
        another `ApiError`."""
        for _ in range(2):
            try:
                return await asyncio.wait_for(self._actor.call.remote(method, *arguments), _LONGEST_CALL_S)
            except RayTaskError as error:
                if isinstance(error.cause, JobQueueError):
                    raise error.cause from error
                raise
            except RayActorError:
                self._actor = self._found()
            except TimeoutError:
                break
        message = f"the tuner did not answer within {_LONGEST_CALL_S:g} s"
        raise ApiError(503, message, code="tuner_unavailable", headers={"retry-after": "5"})

    def _found(self) -> Any:
        settings = self._settings()
        digest = hashlib.sha256(str(settings.folder).encode()).hexdigest()[:12]
        named = {"name": f"plait-tuning-{digest}", "namespace": _NAMESPACE, "get_if_exists": True}
        retries = {"max_restarts": -1, "max_task_retries": -1}  # every method may be called twice
        options = {**named, **retries, "lifetime": "detached", "max_concurrency": 16, "num_cpus": 0}
        actor = ray.remote(TuningActor).options(**options).remote(settings, self._start)
        actor.call.remote("configure", settings)  # it may be older than this replica
        return actor
