"""The ingress's core: requests go to a CN, or to a whole-model process, over the fabric."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from plait_disagg.errors import BadInput, Busy, DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.messages.layout import CardLayouts, layouts_of
from plait_disagg.messages.wire import (
    VERSION,
    cancel_header,
    parse_answers,
    parse_card,
    parse_version,
    rank_message,
    role_payload,
)
from plait_disagg.queue.jobs import Outcome, RankJob, as_rank_error, deliver_all
from plait_disagg.values import ModelCard, RankAnswer
from plait_fabric import FabricError, Message
from plait_fabric.rpc.client import Client, Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost, bare
from plait_fabric.rpc.fields import SEND_S, Header, WireError
from plait_fabric.rpc.outages import Backoff
from plait_fabric.waiting import wait_until
from plait_kernels.threads import set_threads

_MAX_WAY = 0.25
"""The max estimate of the time spent in channels, as a share of the time left until the deadline: only further
requests can show that a channel which was slow once has recovered."""


class RemoteCore:
    """A core that passes jobs on. It sends on the submitting thread, at a cost of some tens of microseconds; that
    thread, an event loop, never waits for a worker that stops reading."""

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
        """Connect at once to `replicas` workers, or as many as there are up to `max_replicas`.

        `window`: requests in flight to one of them; more are rejected with `Busy`.
        """
        self._model = model
        # What clients read. Which process was lost at which address is in the log, for who runs the server.
        self._no_worker = f"model {model}: no worker answers; one is being started"
        self._window = window
        self._card: ModelCard | None = None
        self._layouts: WeakKeyDictionary[Connection[RankJob], CardLayouts] = WeakKeyDictionary()
        self._way = Delay()
        self._stopping = False
        self._requests = self._lost = 0
        protocol = ClientProtocol(
            version=VERSION,
            hello=role_payload("rank"),
            on_welcome=self._on_welcome,
            on_message=self._on_message,
            on_lost=self._on_lost,
            send_timeout_s=SEND_S,
            answer_timeout_s=answer_timeout_s,
        )
        self._client: Client[RankJob] = Client(
            connect,
            protocol,
            name=f"ingress {model}",
            count=replicas,
            max_count=max_replicas,
            window=window,
            backoff=backoff,
            on_thread=partial(set_threads, 1),
        )

    @property
    def card(self) -> ModelCard:
        """The model's card, as reported by a worker."""
        if self._card is None:
            raise self._unavailable(f"model {self._model} is starting: no worker has answered yet")
        return self._card

    @property
    def alive(self) -> bool:
        """False once the core is stopping; lost workers are no reason to replace it."""
        return not self._stopping

    def submit(self, job: RankJob) -> None:
        """Send the job to the worker with the fewest open requests."""
        if self._stopping:
            raise WorkerUnavailable("the server is stopping")
        self._send(job)
        self._requests += 1

    def _send(self, job: RankJob) -> None:
        for _ in range(2):
            connection = self._best()
            try:
                self._send_on(connection, job)
                return
            except ConnectionLost:  # since it was chosen: nothing was begun there
                connection.rest()
        raise self._unavailable(self._no_worker)

    def _best(self) -> Connection[RankJob]:
        connection = self._client.best()
        if connection is not None:
            return connection
        if self._client.up:
            raise Busy(f"{self._window} requests are at the model's worker already")
        raise self._unavailable(self._no_worker)

    def _send_on(self, connection: Connection[RankJob], job: RankJob) -> None:
        try:
            request, layout = replace(job.request, deadline_s=self._due_there_s(job)), self._layouts[connection].inputs
            connection.call(
                job,
                lambda number, pool: rank_message(number, request, layout, pool, timeout_s=0.0),
                later=lambda number, pool: rank_message(number, request, layout, pool),
            )
        except FabricError as error:
            raise as_rank_error(error) from error
        except (KeyError, ValueError) as error:  # it was checked against the card of another version
            raise BadInput(f"the request does not fit model {self._model}: {error}") from error

    def _due_there_s(self, job: RankJob) -> float | None:
        """Return when the worker must be done for the answer to arrive here in time.

        The worker does not see the time spent in channels, which is milliseconds on busy cores; here it is estimated
        as what an answer took beyond the worker's timings.
        """
        if job.due_s is None:
            return None
        return job.due_s - min(self._way.likely_s, _MAX_WAY * max(0.0, job.due_s - time.monotonic()))

    def cancel(self, job: RankJob) -> None:
        """Withdraw the job's open request and notify its worker."""
        job.gone = True
        for connection in self._client.connections:
            number = connection.withdraw(job)
            if number is not None:
                message = bare(cancel_header(number))
                with suppress(ConnectionLost):
                    connection.send(message, later=message)

    def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        return None if self._client.up else self._no_worker

    def metrics(self) -> Mapping[str, float]:
        """Return requests sent, and lost with a worker, so far; workers connected and requests at them now."""
        return {
            "sent_total": self._requests,
            "lost_total": self._lost,
            "workers": self._client.up,
            "at_workers": self._client.open_calls,
        }

    def stop(self, *, drain_s: float) -> None:
        """Reject new jobs, wait up to `drain_s` for open requests, and close the lines."""
        self._stopping = True
        wait_until(lambda: not self._client.open_calls, drain_s)
        self._client.close()

    # On a connection's thread.

    def _on_welcome(self, connection: Connection[RankJob], payload: Header) -> None:
        card = parse_card(payload)
        if card.name != self._model:
            raise WireError(f"the worker ranks with {card.name!r}, not {self._model!r}")
        self._layouts[connection] = layouts_of(card)
        if card != self._card:
            self._card = card

    def _on_message(self, connection: Connection[RankJob], message: Message) -> None:
        with message:
            version = parse_version(message.header)
            if version is not None:
                if self._card is not None:
                    self._card = replace(self._card, version=version)
                return
            answers = parse_answers(message.header, message.keep(), self._layouts[connection].outputs)
        outcomes: list[tuple[RankJob, Outcome]] = []
        for number, outcome in answers:
            job = connection.take(number)  # None: cancelled meanwhile
            if job is None:
                continue
            if isinstance(outcome, WorkerUnavailable) and self._client.up > 1:
                connection.rest()
                self._ask_another(job, outcome)
            else:
                outcomes.append((job, outcome))
            if isinstance(outcome, RankAnswer) and not job.tries:
                self._way.saw(time.monotonic() - job.came_s - outcome.timings.total_s)
        deliver_all(outcomes)

    def _on_lost(self, connection: Connection[RankJob], jobs: list[RankJob], why: str) -> None:  # noqa: ARG002
        self._lost += len(jobs)
        for job in jobs:
            self._ask_another(job, self._unavailable(f"model {self._model}: its worker was lost"))

    def _unavailable(self, why: str) -> WorkerUnavailable:
        return WorkerUnavailable(why, retry_after_s=self._client.back_in_s)

    def _ask_another(self, job: RankJob, error: RankError) -> None:
        """Send a job once more if another worker is there and its client still waits: ranking has no side effects."""
        job.tries += 1
        try:
            if job.due_s is not None and time.monotonic() > job.due_s:
                raise DeadlinePassed(f"the deadline passed; before that: {error.message}")
            if job.tries > 1 or self._stopping or job.gone:
                raise error
            self._send(job)
        except RankError as last:
            job.fail(last)


_MEAN, _DEVIATION = 1 / 8, 1 / 4
"""The weights of the newest observation in the mean and in the deviation (RFC 6298, 2.3)."""

_SURPRISE = 4.0
"""An observation is clamped to this multiple of the likely delay: one stall of the machine must not cause a second's
worth of requests to be refused. If the delay really has grown, every further observation raises the estimate
again."""

_MIN_S = 1e-3
"""The lower bound of the likely delay for that clamp."""


class Delay:
    """Mean and mean deviation of a delay. Not locked: one thread records, any may read."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    @property
    def likely_s(self) -> float:
        """The mean plus one deviation, which few samples exceed; 0 before the first sample."""
        return 0.0 if self._mean_s is None else self._mean_s + self._deviation_s

    def saw(self, seconds: float) -> None:
        """Record one sample."""
        seconds = max(0.0, seconds)
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        seconds = min(seconds, _SURPRISE * max(self.likely_s, _MIN_S))
        self._deviation_s += _DEVIATION * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN * (seconds - self._mean_s)
