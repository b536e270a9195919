"""Calls ControlNets for a batch and collects their answers, request by request.

Calls to one ControlNet go out as one batch. A ControlNet that fails a request fails that request only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.rows import BatchLayout, own_rows
from plait_serving.diffusion.protocols import Answers, ControlCall, ControlNetClient, Residuals, StepCall


@contextmanager
def control_answers(
    calls: Sequence[StepCall], sample: torch.Tensor, layout: BatchLayout, *, exact: bool
) -> Iterator[Callable[[], list[list[Residuals | EngineError]]]]:
    """Send one step's questions to all ControlNets, before the answers are computed. `sample (R, c, h, w)`.

    Inside, call what this gives once: it waits, and returns per request what each of its ControlNets answered, in list
    order. Answers still in flight at the end are waited for and dropped: none may arrive in a later step.
    """
    # A question's place: its request, and its position in that request's list.
    questions: dict[ControlNetClient, dict[tuple[int, int], ControlCall]] = defaultdict(dict)
    for k, call in enumerate(calls):
        rows = own_rows(sample, layout, k) if call.controls else sample
        for i, control in enumerate(call.controls):
            questions[control.client][k, i] = ControlCall(
                session=control.session, sample=rows, timestep=call.timestep, scale=control.scale, exact=exact
            )
    waiting: list[tuple[list[tuple[int, int]], Answers]] = []
    found: dict[tuple[int, int], Residuals | EngineError] = {}

    def answers() -> list[list[Residuals | EngineError]]:
        while waiting:
            places, wait = waiting.pop(0)
            found.update(zip(places, wait(), strict=True))
        return [[found[k, i] for i in range(len(call.controls))] for k, call in enumerate(calls)]

    try:
        for client, asked in questions.items():
            waiting.append((list(asked), client.start(list(asked.values()))))
        yield answers
    finally:
        for _, wait in waiting:
            with suppress(Exception):
                wait()
