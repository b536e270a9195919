"""Calls ControlNets for a batch and collects their answers, request by request.

Calls to one ControlNet go out as one batch. A ControlNet that fails a request fails that request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.rows import BatchLayout, own_rows
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient, PendingResiduals, Residuals, StepCall


@dataclass(slots=True, eq=False)
class _PendingQuestions:
    """One batch of questions to one client. `places[i]` is (request, position in its list) of question i."""

    client: ControlNetClient
    calls: list[ControlCall] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    pending: PendingResiduals | None = None
    refusal: EngineError | None = None


class ControlQuestions:
    """One step's questions to all ControlNets. Made by `ask`, then ended by exactly one of `answers` and `abandon`."""

    def __init__(self, asked: list[_PendingQuestions], lengths: list[int]) -> None:
        self._asked = asked
        self._lengths = lengths

    @classmethod
    def ask(
        cls, calls: Sequence[StepCall], sample: torch.Tensor, layout: BatchLayout, *, exact: bool
    ) -> ControlQuestions:
        """Send every question; return before the answers are computed. `sample (R, c, h, w)`."""
        by_client: dict[int, _PendingQuestions] = {}
        for k, call in enumerate(calls):
            if not call.controls:
                continue
            rows = own_rows(sample, layout, k)
            for place, control in enumerate(call.controls):
                asked = by_client.setdefault(id(control.client), _PendingQuestions(control.client))
                asked.calls.append(
                    ControlCall(
                        session=control.session,
                        sample=rows,
                        timestep=call.timestep,
                        scale=control.scale,
                        exact=exact,
                    )
                )
                asked.places.append((k, place))
        questions = cls(list(by_client.values()), [len(call.controls) for call in calls])
        try:
            for asked in by_client.values():
                try:
                    asked.pending = asked.client.start(asked.calls)
                except EngineError as error:
                    asked.refusal = error
        except BaseException:
            questions.abandon()
            raise
        return questions

    def answers(self) -> list[list[Residuals | EngineError | None]]:
        """Wait; return per request what each of its ControlNets answered, in list order."""
        found: list[list[Residuals | EngineError | None]] = [[None] * length for length in self._lengths]
        waiting = list(self._asked)
        try:
            while waiting:
                asked = waiting.pop(0)
                for (k, place), answer in zip(asked.places, _wait(asked), strict=True):
                    found[k][place] = answer
        except BaseException:
            _drain(waiting)
            raise
        return found

    def abandon(self) -> None:
        """Wait for the answers in flight and drop them: none may arrive in a later step."""
        _drain(self._asked)


def _wait(asked: _PendingQuestions) -> Sequence[Residuals | EngineError]:
    if asked.pending is None:
        assert asked.refusal is not None
        return [asked.refusal] * len(asked.calls)
    try:
        return asked.pending.wait()
    except EngineError as error:
        return [error] * len(asked.calls)


def _drain(asked: Sequence[_PendingQuestions]) -> None:
    for one in asked:
        if one.pending is not None:
            with suppress(Exception):
                one.pending.wait()
