"""The server side of a ControlNet as a service, without Ray: clients of several base replicas, one compute thread.

Steps that wait at the same time and agree in shape share one forward pass, whichever client sent them. The oldest
waiting step always goes next, so none starves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

from plait_disagg.request_log import work_for
from plait_fabric import Listener, Message
from plait_fabric.rpc.fields import only
from plait_fabric.rpc.server import Peer, Server, ServerProtocol
from plait_fabric.tensors import pack_tensors, tensors_of
from plait_kernels.devices import is_device_lost
from plait_kernels.executors.graphs import capture_waiting
from plait_kernels.heartbeat import ThreadHeartbeat
from plait_kernels.threads import set_threads
from plait_serving.diffusion.controlnet.sessions import SessionTable, batch_key
from plait_serving.diffusion.controlnet.wire import (
    VERSION,
    Answer,
    Close,
    Open,
    Request,
    Step,
    UnknownSession,
    parse_request,
    reply_message,
)
from plait_serving.diffusion.errors import EngineError, ModelError
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient

_log = logging.getLogger(__name__)

_MAX_BACKLOG = 64
"""The max messages of one client that wait to be processed or whose answer waits to be sent; a correct client has a
handful."""

_NAP_S = 1.0
"""So long nothing must happen before a shape is captured that has recurred."""

_KEPT_KINDS = 256
"""Shapes and row counts whose time is remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The most that one service holds and runs."""

    largest_batch_rows: int = 64
    sessions_bytes: int = 1 << 30
    channels: int = 128
    send_timeout_s: float = 10.0


@dataclass(slots=True, kw_only=True)
class ServiceStatistics:
    """Counts since the start, except `channels` and `sessions`, which are current values.

    `steps` counts messages. `busy_s` is compute time, embedding included.
    """

    channels: int = 0
    sessions: int = 0
    opened: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """One step message: its calls with the constants of their sessions, or why they cannot be computed."""

    peer: Peer
    seq: int
    calls: list[ControlCall | EngineError]

    @property
    def computed(self) -> list[ControlCall]:
        return [call for call in self.calls if isinstance(call, ControlCall)]

    @property
    def keys(self) -> frozenset[Hashable]:
        return frozenset(map(batch_key, self.computed))

    @property
    def rows(self) -> int:
        return sum(call.session.rows for call in self.computed)


class ControlNetService:
    """Serves one ControlNet to every channel that the listeners accept. Owns the listeners."""

    def __init__(
        self,
        name: str,
        runner: ControlNetClient,
        listeners: Sequence[Listener],
        *,
        limits: ServiceLimits | None = None,
        threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at once. `runner`: the ControlNet in this process. `threads`: CPU threads of a forward pass; 0 leaves
        torch's setting unchanged."""
        self._name = name
        self._runner = runner
        self._clock = clock
        self._limits = limits or ServiceLimits()
        self._threads = threads
        self._sessions = SessionTable(capacity_bytes=self._limits.sessions_bytes)
        self._inbox: SimpleQueue[tuple[Peer, Request | None] | None] = SimpleQueue()
        """What the peers' threads hand to the compute thread; of a peer without a request, that it has left. None wakes
        it."""
        self._jobs: deque[_Job] = deque()
        self._counts = ServiceStatistics()
        self._batch_s: dict[tuple[frozenset[Hashable], int], float] = {}
        self._heartbeat = ThreadHeartbeat(clock)
        self._stopping = threading.Lock()
        self._stopped = False
        self._compute = threading.Thread(target=self._run, name=f"controlnet {name}", daemon=True)
        self._compute.start()
        protocol = ServerProtocol(
            version=VERSION,
            on_hello=lambda payload: only(payload, set()),
            welcome=lambda: {"controlnet": name},
            on_message=self._on_message,
            on_lost=lambda peer: self._inbox.put((peer, None)),
            send_timeout_s=self._limits.send_timeout_s,
            max_peers=self._limits.channels,
            backlog=_MAX_BACKLOG,
        )
        self._server = Server(protocol, listeners, name=f"controlnet {name}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses it listens on, in the order of the listeners."""
        return self._server.addresses

    @property
    def alive(self) -> bool:
        """Whether it accepts and computes."""
        return not self._stopped and self._compute.is_alive() and self._server.alive

    @property
    def is_idle(self) -> bool:
        """Whether no step waits or runs; may be a moment late."""
        return not self._jobs and self._inbox.empty()

    def check_progress(self) -> None:
        """Raise `Stuck` if the compute thread hangs. Call every few seconds."""
        if not self._stopped:
            self._heartbeat.check()

    def reconfigure(self, *, threads: int, largest_batch_rows: int) -> None:
        """Change what can change without a restart; takes effect from the next forward pass on."""
        self._limits = replace(self._limits, largest_batch_rows=largest_batch_rows)
        self._threads = threads

    def statistics(self) -> ServiceStatistics:
        """Return a snapshot. A batch that is just being counted may be partly included; clients are included once
        greeted."""
        return replace(self._counts, channels=self._server.peers, sessions=len(self._sessions))

    def stop(self, *, drain_s: float = 5.0) -> None:
        """Accept nothing more, answer the steps that have arrived, then close the channels. Idempotent; waits for its
        threads.

        Clients whose steps were not answered within `drain_s` see the channel close and call another replica.
        """
        with self._stopping:
            if self._stopped:
                return
            self._stopped = True
        self._server.close_listeners()
        self._inbox.put(None)
        self._compute.join(drain_s)
        self._server.hang_up(flush_s=min(1.0, drain_s))

    def _on_message(self, peer: Peer, message: Message) -> None:
        """Pass the request on with its own copies of the tensors: those of a message go back to the channel."""
        with tensors_of(message) as arrived:
            request = parse_request(arrived.header, {name: it.clone() for name, it in arrived.tensors.items()})
        peer.admit()
        self._inbox.put((peer, request))

    # What follows runs on the compute thread.

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            _log.exception("ControlNet %s: the compute thread died", self._name)

    def _work(self) -> None:
        threads = 0
        while True:
            self._heartbeat.rest()
            work_for(tuple)
            items = self._arrived(0.0 if self._jobs else _NAP_S)
            self._heartbeat.begin("opening the sessions that have arrived")
            if self._threads != threads:  # after the wait: a change holds from the next forward pass on
                threads = self._threads
                set_threads(threads)
            for peer, request in filter(None, items):
                self._take(peer, request)
            if self._jobs:
                self._run_batch()
            elif self._stopped and self._inbox.empty():
                return
            elif not items:
                capture_waiting()

    def _arrived(self, wait_s: float) -> list[tuple[Peer, Request | None] | None]:
        """Return everything in the inbox, after waiting at most `wait_s` for something."""
        items = []
        with suppress(Empty):
            items.append(self._inbox.get(timeout=wait_s))
            while True:
                items.append(self._inbox.get_nowait())
        return items

    def _take(self, peer: Peer, request: Request | None) -> None:
        match request:
            case None:
                self._sessions.forget_peer(peer.number)
                self._jobs = deque(job for job in self._jobs if job.peer is not peer)
            case Open():
                work_for(lambda: (request.request,))
                self._open(peer, request)
                peer.done()
            case Step():  # sessions are looked up now, so that a close that follows the step does not remove them
                calls = [self._in_session(peer, call) for call in request.calls]
                self._jobs.append(_Job(peer=peer, seq=request.seq, calls=calls))
            case Close():
                self._sessions.forget(peer.number, request.session)
                peer.done()

    def _open(self, peer: Peer, request: Open) -> None:
        started_s = self._clock()
        try:
            held = self._runner.open(
                image=request.image,
                conditioning=request.conditioning,
                width=request.width,
                height=request.height,
            )
            self._sessions.put(peer.number, request.session, replace(held, request=request.request))
        except Exception as error:
            if is_device_lost(error):
                raise
            known = error if isinstance(error, EngineError) else ModelError(f"the ControlNet refused: {error}")
            _log.warning("ControlNet %s: a session could not be opened: %s", self._name, known)
            self._sessions.put(peer.number, request.session, known)
        self._counts.opened += 1
        self._counts.busy_s += self._clock() - started_s

    def _in_session(self, peer: Peer, call: ControlCall) -> ControlCall | EngineError:
        held = self._sessions.get(peer.number, call.session)
        if held is None:
            return UnknownSession(f"session {call.session} is not known")
        return held if isinstance(held, EngineError) else replace(call, session=held)

    def _run_batch(self) -> None:
        """Run one forward pass for the oldest step and all waiting steps that fit it."""
        batch = self._choose()
        work_for(lambda: (call.session.request for job in batch for call in job.computed))
        kind = batch[0].keys, sum(job.rows for job in batch)
        self._heartbeat.begin(f"a batch of {kind[1]} rows", self._batch_s.get(kind))
        started_s = self._clock()
        computed = iter(self._runner.start([call for job in batch for call in job.computed])())
        seconds = self._clock() - started_s
        self._measured(kind, seconds)
        self._counts.steps += len(batch)
        self._counts.busy_s += seconds
        for job in batch:
            self._reply(job, [next(computed) if isinstance(call, ControlCall) else call for call in job.calls])

    def _measured(self, kind: tuple[frozenset[Hashable], int], seconds: float) -> None:
        """Keep what a batch took, of the kinds that ran last."""
        self._batch_s.pop(kind, None)
        self._batch_s[kind] = seconds
        if len(self._batch_s) > _KEPT_KINDS:
            del self._batch_s[next(iter(self._batch_s))]

    def _choose(self) -> list[_Job]:
        batch = [self._jobs.popleft()]
        rows, later = batch[0].rows, deque[_Job]()
        for job in self._jobs:
            fits = job.keys == batch[0].keys and rows + job.rows <= self._limits.largest_batch_rows
            (batch if fits else later).append(job)
            rows += job.rows if fits else 0
        self._jobs = later
        return batch

    def _reply(self, job: _Job, answers: Sequence[Answer]) -> None:
        header, tensors = reply_message(job.seq, answers)
        job.peer.reply(partial(pack_tensors, header=header, tensors=tensors, timeout_s=self._limits.send_timeout_s))
