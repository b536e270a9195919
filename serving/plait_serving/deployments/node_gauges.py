"""The GPUs of Ray's nodes for `/metrics`: how much is idle, and how much of that is stranded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import Metric

from plait_deploy.on_ray.gauges import gauges
from plait_deploy.on_ray.nodes import CPUS, GPUS, living_nodes, ray_nodes
from plait_serving.deployments.metrics import ask_each

_log = logging.getLogger(__name__)

_KEPT_S = 5.0
_ANSWER_S = 2.0


class NodeGauges:
    """Asks all replicas where they are, in the background and at most every few seconds; a scrape never waits long."""

    def __init__(
        self,
        handles: Mapping[str, Any],
        *,
        nodes: Callable[[], Any] = ray_nodes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handles = handles
        self._nodes, self._clock = nodes, clock
        self._asking: asyncio.Task[None] | None = None
        self._families, self._asked_s = gauges((), (), {}), float("-inf")

    async def families(self) -> Sequence[Metric]:
        """Return the gauges as they were last; without a GPU their families are empty."""
        is_asking = self._asking is not None and not self._asking.done()
        if self._handles and not is_asking and self._clock() - self._asked_s >= _KEPT_S:
            self._asking = asyncio.create_task(self._look())
        return self._families

    async def _look(self) -> None:
        try:
            self._families = await asyncio.to_thread(self._ask)
        except Exception as error:
            _log.warning("the GPUs of the nodes are not known: %s", error)
        self._asked_s = self._clock()

    def _ask(self) -> list[Metric]:
        nodes = living_nodes(self._nodes())
        if not any(each.node.gpus for each in nodes):
            return gauges((), (), {})
        from plait_deploy.placement.demands import Demand, task_of  # an ingress without GPUs needs none of it

        answers = ask_each(self._handles, "whereabouts", timeout_s=_ANSWER_S)
        reports = {name: [it for it in said if isinstance(it, Mapping)] for name, said in answers.items()}
        demands = [
            Demand(
                name=name,
                task=task_of(name, num_cpus=said[0].get(CPUS, 0.0), num_gpus=said[0].get(GPUS, 0.0)),
                replicas=len(said),
            )
            for name, said in reports.items()
            if said
        ]
        return gauges(nodes, demands, reports)
