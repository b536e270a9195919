"""The HTTP deployment, in front of the deployments that hold models."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait_deploy.on_ray.gauges import gauges
from plait_deploy.on_ray.nodes import living_nodes, ray_nodes
from plait_serving.deployments import ENGINE
from plait_serving.deployments.direct import DirectListener
from plait_serving.deployments.handles import AllReplicas
from plait_serving.deployments.images.handle import HandleImageService
from plait_serving.deployments.process import configure_logging, shorten_gil_interval
from plait_serving.deployments.ray_internals import given_knobs, note, noted
from plait_serving.http.context import HttpSettings, RouteContext
from plait_serving.http.desk import Desk, JobState
from plait_serving.http.edge.refusals import without_repeated
from plait_serving.imports import importing
from plait_serving.replica_metrics import ReplicaMetrics, this_process

if TYPE_CHECKING:
    from fastapi import APIRouter

    from plait_serving.ranking.local import LocalRankingService

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""So long after a request what tenants used is asked for: what a replica counts after that is lost with it."""


class Ingress:
    """The HTTP API as a deployment; wrap it with `ray.serve.ingress()`, which builds the app in the replica."""

    def __init__(
        self,
        handles: Mapping[str, Any],
        settings: Callable[[], HttpSettings],
        ranking: Mapping[str, Path] | None = None,
        *,
        routers: Callable[[Mapping[str, Any]], Sequence[APIRouter]] | None = None,
        direct: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the ingress replica. `handles`: of all deployments behind it, by their names. `ranking`: the ranking
        models' folders by name. `routers`: makes, in the replica, additional routes of other components, from its
        `user_config` as it is at any moment. `direct`: what it listens at itself (`DirectListener`)."""
        configure_logging("ingress", os.environ)
        shorten_gil_interval()
        self._images = HandleImageService(handles[ENGINE]) if ENGINE in handles else None
        self._settings = settings
        self._routers = routers
        self._ranking: LocalRankingService | None = None
        if ranking:  # an image-only server does without torch
            with importing():
                from plait_serving.deployments.ranking.service import remote_ranking

            self._ranking = remote_ranking(ranking, handles)
        self._answers = OpenResponses(self._look_soon)
        self._looking: asyncio.Task[None] | None = None
        self._user_config = dict(given_knobs())
        self._direct = None if direct is None else DirectListener(**direct)
        self._context: RouteContext | None = None
        self._ingresses = AllReplicas(make=_handle_of_this_deployment)
        self._others = [self._ingresses, *(AllReplicas(it) for name, it in handles.items() if name != ENGINE)]
        self._desk = SharedDesk(self._ingresses)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply `user_config`; Serve calls this after the constructor and on every change."""
        self._user_config.update(user_config)

    async def check_health(self) -> None:
        """Raise if the replica is unhealthy; Serve then restarts it."""
        self._look_soon()
        if self._direct is not None and (failure := self._direct.failure) is not None:
            raise RuntimeError(failure)

    async def drain(self, drain_s: float) -> bool:
        """Wait at most `drain_s` until no request is open; return whether that was reached. New requests through
        Serve's proxy are not refused."""
        if self._direct is not None:
            self._direct.refuse_new()
        return await self._answers.wait_until_none(drain_s)

    async def metric_families(self) -> ReplicaMetrics:
        """Return what this replica counts, and what it knows of all tenants."""
        from plait_serving.http.operations import own_metrics

        if self._context is None:
            return ReplicaMetrics(replica=this_process(), families=())
        return await own_metrics(self._context)

    async def a1111_jobs(self, tenant: str, interrupts: bool) -> list[JobState]:  # Serve passes arguments by place
        """Return what runs for a tenant that came through A1111's API here, and interrupt it if asked to."""
        return self._desk.own_jobs(tenant, interrupts=interrupts)

    async def _neighbours(self) -> list[ReplicaMetrics]:
        """Return what the other replicas of the ingress count, and those of all deployments but the engine."""
        found = await asyncio.gather(*(each.answers() for each in self._others))
        return [answer for answers in found for answer in answers if answer.replica != this_process()]

    def _look_soon(self) -> None:
        """Learn what tenants used, now that this may have changed or a replica that knew it may be going."""
        if self._context is not None and (self._looking is None or self._looking.done()):
            wait_s = 0.0 if self._looking is None else LOOK_S
            self._looking = asyncio.get_running_loop().create_task(self._look(self._context, wait_s))

    async def _look(self, context: RouteContext, wait_s: float) -> None:
        from plait_serving.http.operations import gather

        await asyncio.sleep(wait_s)
        await gather(context)

    def __serve_build_asgi_app__(self) -> ASGIApp:  # Serve's name for it
        """Return the ASGI application; Serve calls this after the constructor."""
        direct, count = self._direct, self._answers.count
        with importing():
            from plait_serving.http.app import app_from_context

            self._context = RouteContext(
                images=self._images,
                settings=self._settings(),
                ranking=self._ranking,
                neighbours=self._neighbours,
                nodes=NodeGauges().families,
                desk=self._desk,
            )
            app = app_from_context(
                self._context,
                routers=() if self._routers is None else self._routers(self._user_config),
                lifespan=None if direct is None else lambda app: direct.answering(count(without_repeated(app))),
            )
        return count(without_request_id(app))


def _handle_of_this_deployment() -> Any:
    """Return a handle of the deployment that this process is a replica of. Asks Serve's controller."""
    from ray import serve

    here = serve.get_replica_context()
    return serve.get_deployment_handle(here.deployment, here.app_name)


class NodeGauges:
    """The GPUs of Ray's nodes: how much is idle, and how much of that is stranded. Ray is asked in the background; a
    scrape never waits for it."""

    def __init__(self, nodes: Callable[[], Sequence[Mapping[str, Any]]] = ray_nodes) -> None:
        self._nodes = nodes
        self._families: Sequence[Metric] = gauges((), ())
        self._looking: asyncio.Task[None] | None = None

    def families(self, reports: Sequence[Mapping[str, float]]) -> Sequence[Metric]:
        """Return the gauges as they were last, and look again, by what replicas say now of where they are."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(reports))
        return self._families

    async def _look(self, reports: Sequence[Mapping[str, float]]) -> None:
        try:
            self._families = await asyncio.to_thread(lambda: gauges(living_nodes(self._nodes()), reports))
        except Exception as error:  # Ray's errors have no common base
            _log.warning("the GPUs of the nodes are not known: %s", error)


class SharedDesk(Desk):
    """A desk of several ingresses: checkpoints are kept in this Ray, and all are asked what runs there."""

    def __init__(self, ingresses: AllReplicas) -> None:
        super().__init__()
        self._ingresses = ingresses

    async def checkpoint(self, tenant: str) -> str | None:
        """Return the model that a tenant chose, at whichever ingress, or None."""
        return await asyncio.to_thread(noted, _checkpoint_key(tenant)) or None

    async def choose(self, tenant: str, model: str) -> None:
        """Remember a tenant's model for all ingresses, as long as this Ray lasts."""
        await asyncio.to_thread(note, _checkpoint_key(tenant), model.encode())

    async def jobs(self, tenant: str, *, interrupts: bool = False) -> Sequence[JobState]:
        """Return what runs for a tenant at all ingresses, and interrupt it if asked to."""
        answers = await self._ingresses.call("a1111_jobs", tenant, interrupts)
        told = [answer for answer in answers if isinstance(answer, list)]
        return [job for answer in told for job in answer] if told else self.own_jobs(tenant, interrupts=interrupts)


def _checkpoint_key(tenant: str) -> str:
    from ray import serve

    return f"plait-a1111:{serve.get_replica_context().app_name}:{tenant}"


class OpenResponses:
    """Counts the requests whose response has not been sent yet."""

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """Take what to call after each response."""
        self._ended = ended
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def count(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application so that its requests are counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            self._open += 1
            self._none.clear()
            try:
                await app(scope, receive, send)
            finally:
                self._open -= 1
                if not self._open:
                    self._none.set()
                self._ended()

        return counted

    async def wait_until_none(self, timeout_s: float) -> bool:
        """Wait until the count is 0; return False after `timeout_s`."""
        try:
            await asyncio.wait_for(self._none.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Remove the application's `x-request-id` from its responses: Serve's proxy appends the same id to every response,
    and a response with both would read as "id, id"."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        await app(scope, receive, send_without)

    return wrapped
