"""The ingress's core: requests go to a CN, or to a whole-model process, over the fabric."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from plait_disagg.errors import BadInput, Busy, DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.messages.layout import MessageLayout, layout_of_inputs
from plait_disagg.messages.wire import (
    WireError,
    cancel_header,
    parse_answers,
    parse_metrics,
    parse_version,
    rank_message,
)
from plait_disagg.queue.delay import Delay
from plait_disagg.queue.jobs import Outcome, RankJob, settle
from plait_disagg.queue.metrics_throttle import sum_metrics
from plait_disagg.values import ModelCard, RankAnswer
from plait_disagg.workers.lines import Backoff, Connect, Line, Lines
from plait_disagg.workers.ranker import CoreRanker
from plait_fabric import Message

__all__ = ["RemoteCore", "RemoteRanker"]

_LOOK_S = 0.02

_MAX_WAY = 0.25
"""Of what is left until a deadline: a way that once was long must be gone again to show that it is not."""


class RemoteCore:
    """A core that passes jobs on. Sends from the thread that submits, which costs it some tens of microseconds."""

    def __init__(
        self,
        model: str,
        connect: Connect,
        *,
        replicas: int = 1,
        max_replicas: int | None = None,
        window: int = 1_024,
        answer_timeout_s: float = 30.0,
        backoff: Backoff | None = None,
    ) -> None:
        """Starts to connect at once, to ``replicas`` workers, or as many as there are up to ``max_replicas``.
        ``window``: requests at one of them; more are refused as `Busy`."""
        self._model = model
        self._window = window
        self._card: ModelCard | None = None
        self._worker_metrics: dict[Line[RankJob], Mapping[str, float]] = {}
        self._layouts: dict[Line[RankJob], MessageLayout] = {}
        self._way = Delay()
        self._stopping = False
        self._requests = self._lost = 0
        self._lines: Lines[RankJob] = Lines(
            connect,
            count=replicas,
            most=max_replicas,
            window=window,
            role="rank",
            name=f"ingress {model}",
            on_up=self._on_up,
            on_message=self._on_message,
            on_lost=self._on_lost,
            answer_timeout_s=answer_timeout_s,
            backoff=backoff,
        )

    @property
    def card(self) -> ModelCard:
        """See `Core.card`."""
        if self._card is None:
            raise WorkerUnavailable(f"model {self._model} is starting: {self._lines.why_down}")
        return self._card

    @property
    def alive(self) -> bool:
        """See `Core.alive`."""
        return not self._stopping

    def submit(self, job: RankJob) -> None:
        """See `Core.submit`."""
        if self._stopping:
            raise WorkerUnavailable("the server is stopping")
        self._requests += 1
        self._send(job)

    def _send(self, job: RankJob) -> None:
        line = self._lines.best()
        if line is None:
            if self._lines.up:
                raise Busy(f"{self._window} requests are at the model's worker already")
            raise WorkerUnavailable(f"model {self._model}: {self._lines.why_down}")
        try:
            request = replace(job.request, deadline_s=self._due_there_s(job))
            line.ask(job, lambda number, pool: rank_message(number, request, self._layouts[line], pool))
        except (KeyError, ValueError) as error:  # it was checked against the card of another version
            raise BadInput(f"the request does not fit model {self._model}: {error}") from error

    def _due_there_s(self, job: RankJob) -> float | None:
        """When the worker must be done for the answer to be here in time. The worker does not see what goes by in
        channels, and on busy cores that is milliseconds; here it is what an answer took beyond the worker's timings."""
        if job.due_s is None:
            return None
        return job.due_s - min(self._way.likely_s, _MAX_WAY * max(0.0, job.due_s - time.monotonic()))

    def cancel(self, job: RankJob) -> None:
        """See `Core.cancel`."""
        job.gone = True
        for line in self._lines.all:
            number = line.withdraw(job)
            if number is not None:
                line.tell(cancel_header(number))

    def ready(self) -> str | None:
        """See `Core.ready`."""
        return None if self._lines.up else f"model {self._model}: {self._lines.why_down}"

    def metrics(self) -> Mapping[str, float]:
        """Requests sent, and lost with a worker, so far; workers connected and requests at them now; what the workers
        count, as of their last answers."""
        return {
            "sent_total": self._requests,
            "lost_total": self._lost,
            "workers": self._lines.up,
            "at_workers": self._lines.open_questions,
            **sum_metrics("worker_", list(self._worker_metrics.values())),
        }

    def stop(self, *, drain_s: float) -> None:
        """See `Core.stop`."""
        self._stopping = True
        until_s = time.monotonic() + drain_s
        while self._lines.open_questions and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self._lines.close()

    # On a line's thread.

    def _on_up(self, line: Line[RankJob], card: ModelCard) -> None:
        if card.name != self._model:
            raise WireError(f"the worker ranks with {card.name!r}, not {self._model!r}")
        self._layouts[line] = layout_of_inputs(card.inputs)
        if card != self._card:
            self._card = card

    def _on_message(self, line: Line[RankJob], message: Message) -> None:
        with message:
            version = parse_version(message.header)
            if version is not None:
                self._now_at(version)
                return
            answers = parse_answers(message.header, message.buffers)
            said = parse_metrics(message.header)
        if said is not None:
            self._worker_metrics[line] = said
        outcomes: list[tuple[RankJob, Outcome]] = []
        for number, outcome in answers:
            job = line.take(number)  # None: cancelled meanwhile
            if job is None:
                continue
            if isinstance(outcome, WorkerUnavailable) and self._lines.up > 1:
                line.rest()
                self._ask_another(job, outcome)
            else:
                outcomes.append((job, outcome))
            if isinstance(outcome, RankAnswer) and not job.tries:
                self._way.saw(time.monotonic() - job.came_s - outcome.timings.total_s)
        settle(outcomes)

    def _now_at(self, version: str) -> None:
        if self._card is not None and self._card.version != version:
            self._card = replace(self._card, version=version)

    def _on_lost(self, line: Line[RankJob], jobs: list[RankJob], why: str) -> None:
        self._worker_metrics.pop(line, None)
        self._lost += len(jobs)
        for job in jobs:
            self._ask_another(job, WorkerUnavailable(why))

    def _ask_another(self, job: RankJob, error: RankError) -> None:
        """Ranking changes nothing anywhere, so what a worker lost is asked once more, if another worker is there and
        somebody still waits for the answer."""
        job.tries += 1
        try:
            if job.due_s is not None and time.monotonic() > job.due_s:
                raise DeadlinePassed(f"the deadline passed; before that: {error.message}")
            if job.tries > 1 or self._stopping or job.gone:
                raise error
            self._send(job)
        except RankError as last:
            job.fail(last)


class RemoteRanker(CoreRanker):
    """A `Ranker` whose model is in other processes."""

    def __init__(
        self,
        model: str,
        connect: Connect,
        *,
        replicas: int = 1,
        max_replicas: int | None = None,
        window: int = 1_024,
        answer_timeout_s: float = 30.0,
        backoff: Backoff | None = None,
    ) -> None:
        """See `RemoteCore`."""
        super().__init__(
            RemoteCore(
                model,
                connect,
                replicas=replicas,
                max_replicas=max_replicas,
                window=window,
                answer_timeout_s=answer_timeout_s,
                backoff=backoff,
            )
        )
