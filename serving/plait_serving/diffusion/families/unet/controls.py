"""Calls ControlNets for a batch and collects their answers, request by request.

Calls to one ControlNet go out as one batch. A ControlNet that fails a request fails that request only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

import torch

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.rows import BatchLayout, own_rows
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient, PendingResiduals, Residuals, StepCall


class ControlQuestions:
    """One step's questions to all ControlNets, which leave when it is made; ended by exactly one of `answers` and
    `abandon`. A question's place: its request, and its position in that request's list."""

    def __init__(self, calls: Sequence[StepCall], sample: torch.Tensor, layout: BatchLayout, *, exact: bool) -> None:
        """Send every question; return before the answers are computed. `sample (R, c, h, w)`."""
        self._lengths = [len(call.controls) for call in calls]
        self._waiting: list[tuple[list[tuple[int, int]], PendingResiduals]] = []
        self._found: dict[tuple[int, int], Residuals | EngineError] = {}
        questions: dict[ControlNetClient, dict[tuple[int, int], ControlCall]] = defaultdict(dict)
        for k, call in enumerate(calls):
            rows = own_rows(sample, layout, k) if call.controls else sample
            for i, control in enumerate(call.controls):
                questions[control.client][k, i] = ControlCall(
                    session=control.session, sample=rows, timestep=call.timestep, scale=control.scale, exact=exact
                )
        try:
            for client, asked in questions.items():
                try:
                    self._waiting.append((list(asked), client.start(list(asked.values()))))
                except EngineError as error:
                    self._found |= dict.fromkeys(asked, error)
        except BaseException:
            self.abandon()
            raise

    def answers(self) -> list[list[Residuals | EngineError]]:
        """Wait; return per request what each of its ControlNets answered, in list order."""
        try:
            while self._waiting:
                places, pending = self._waiting.pop(0)
                try:
                    self._found |= zip(places, pending.wait(), strict=True)
                except EngineError as error:
                    self._found |= dict.fromkeys(places, error)
        except BaseException:
            self.abandon()
            raise
        return [[self._found[k, i] for i in range(length)] for k, length in enumerate(self._lengths)]

    def abandon(self) -> None:
        """Wait for the answers in flight and drop them: none may arrive in a later step."""
        for _, pending in self._waiting:
            with suppress(Exception):
                pending.wait()
