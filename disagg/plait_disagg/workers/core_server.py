"""The fabric's face of a core: ingress processes send requests over channels and receive answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from plait_disagg.errors import BadInput, RankError
from plait_disagg.messages.layout import layouts_of
from plait_disagg.messages.wire import (
    VERSION,
    answers_message,
    card_payload,
    check_role,
    parse_number,
    parse_rank,
    version_header,
)
from plait_disagg.queue.jobs import Core, Outcome, RankJob
from plait_disagg.request_log import on_behalf_of
from plait_disagg.workers.base import ServedWorker
from plait_fabric import Listener, Message
from plait_fabric.layouts import Layout
from plait_fabric.rpc.fields import WireError
from plait_fabric.rpc.server import Peer, ServerProtocol
from plait_fabric.waiting import wait_until

_log = logging.getLogger(__name__)

_MAX_OUTCOMES = 256
"""Of one message: each takes up to 140 bytes of its header, which has 64 KiB (`plait_fabric.values.MessageLimits`)."""

_LAST_SENDS_S = 0.2
"""The max wait between the last outcome and closing the channels: a closed channel may lose what its peer has not
received yet."""


class CoreServer(ServedWorker):
    """Serves a core on listeners. Owns the listeners and the core."""

    def __init__(self, core: Core, listeners: Sequence[Listener]) -> None:
        """Start serving at once."""
        self._core = core
        self._card = core.card
        self._layouts = layouts_of(core.card)
        self._sinks: dict[int, _PeerSink] = {}
        protocol = ServerProtocol(
            version=VERSION,
            on_hello=partial(check_role, role="rank"),
            welcome=lambda: card_payload(core.card),
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        self._serve(protocol, listeners, name="rank")

    @property
    def alive(self) -> bool:
        """False when the process must be replaced."""
        return super().alive and self._core.alive

    def announce(self) -> None:
        """Notify clients of the core's new version."""
        self._server.announce(version_header(self._core.card.version))

    def stop(self, *, drain_s: float) -> None:
        """Accept nothing new, answer within `drain_s` what was accepted, and close the channels. Idempotent."""
        self._server.close_listeners()
        self._core.stop(drain_s=drain_s)
        wait_until(lambda: not any(sink.jobs for sink in self._sinks.values()), _LAST_SENDS_S)
        self._server.hang_up()

    def _on_message(self, peer: Peer, message: Message) -> None:
        sink = self._sinks.get(peer.number)
        if sink is None:
            sink = self._sinks[peer.number] = _PeerSink(peer, self._layouts.outputs)
        with message:
            kind, number = message.header.get("kind"), parse_number(message.header)
            if kind == "rank":
                # Copied: the lookups may come much later than the next message.
                self._rank(sink, number, message.header, message.keep())
            elif kind == "cancel":
                self._cancel(sink, number)
            else:
                raise WireError(f"a message of kind {str(kind)[:50]!r}")

    def _rank(self, sink: _PeerSink, number: int, header: Mapping[str, Any], buffers: list[memoryview]) -> None:
        try:
            request = parse_rank(header, buffers, self._card, self._layouts.inputs)
        except WireError as error:  # perhaps it was made for another version of the model
            sink.send([(number, BadInput(f"the request does not fit model {self._card.name}: {error}"))])
            return
        job = RankJob(request=request, sink=sink, ticket=number)
        sink.jobs[number] = job
        try:
            self._core.submit(job)
        except RankError as error:
            sink.deliver([(job, error)])

    def _cancel(self, sink: _PeerSink, number: int) -> None:
        job = sink.jobs.pop(number, None)
        if job is not None:
            self._core.cancel(job)

    def _on_lost(self, peer: Peer) -> None:
        sink = self._sinks.pop(peer.number, None)
        for job in list(sink.jobs.values()) if sink is not None else ():
            self._core.cancel(job)


class _PeerSink:
    """Sends outcomes to one client; the tickets of their jobs are its request numbers."""

    def __init__(self, peer: Peer, outputs: Layout) -> None:
        self._peer = peer
        self._outputs = outputs
        self.jobs: dict[int, RankJob] = {}

    def deliver(self, outcomes: Sequence[tuple[RankJob, Outcome]]) -> None:
        """Send the outcomes to the client, in one message unless there are very many."""
        with on_behalf_of(lambda: (job.request.request_id for job, _ in outcomes)):
            numbered = [(job.ticket, outcome) for job, outcome in outcomes if isinstance(job.ticket, int)]
            for first in range(0, len(numbered), _MAX_OUTCOMES):
                self.send(numbered[first : first + _MAX_OUTCOMES])

    def send(self, numbered: Sequence[tuple[int, Outcome]]) -> None:
        """Send outcomes by the numbers of their requests, in one message."""
        try:
            header, buffers = answers_message(numbered, self._outputs, self._peer.pool)
        except Exception as error:
            _log.exception("answers that cannot be sent")
            broken = RankError(f"internal error ({type(error).__name__}); the worker's log has the details")
            header, buffers = answers_message([(it, broken) for it, _ in numbered], self._outputs, self._peer.pool)
        self._peer.send(header, buffers)
        for number, _ in numbered:
            self.jobs.pop(number, None)
