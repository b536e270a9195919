"""What both ranking routes do with a checked request: call the ranker, which keeps the deadline, and count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait_disagg.errors import BadInput
from plait_disagg.values import RankAnswer, RankRequest
from plait_serving.http.context import RouteContext
from plait_serving.http.edge.json_body import MAX_DEADLINE_MS
from plait_serving.ranking.service import BoundModel


def deadline(parameters: Mapping[str, Any], now_s: float) -> float | None:
    """Return the moment set by `deadline_ms` (ours) or `timeout` (Triton's, in microseconds; 0 is none).

    Raises `BadInput`.
    """
    wait_ms, name = parameters.get("deadline_ms"), "deadline_ms"
    if wait_ms is None:
        timeout_us, name = parameters.get("timeout", 0), "timeout"
        if timeout_us == 0:
            return None
        wait_ms = timeout_us / 1e3 if type(timeout_us) in (int, float) else timeout_us
    if type(wait_ms) not in (int, float) or not 0 < wait_ms <= MAX_DEADLINE_MS:
        message = f"parameters.{name}: must be a number above 0, at most {MAX_DEADLINE_MS} ms"
        raise BadInput(message, param=f"parameters.{name}")
    return now_s + float(wait_ms) / 1e3


async def rank(context: RouteContext, bound: BoundModel, request: RankRequest, *, tenant: str) -> RankAnswer:
    """Return the ranker's answer. Raises `RankError`."""
    start_s = context.monotonic_s()
    answer = await bound.ranker.rank(request)
    context.metrics.observe_rank(bound.name, request.candidates, context.monotonic_s() - start_s, answer, tenant)
    return answer


def unique_id(state: Mapping[str, Any], number: int) -> str:
    """Return the request's id with a number appended: a client's id may repeat."""
    return f"{state['request_id']}.{number}"
