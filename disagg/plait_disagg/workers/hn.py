"""The HN worker: crossing tensors of batches arrive over channels from CNs, outputs go back.

Batches that wait at the same time are joined and computed as one, as far as their deadlines allow. None is
rejected: a batch holds requests of several deadlines, and its CN has checked each. A batch that arrives alone at an
idle HN is computed by the thread that received it, which saves a hop to another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from plait_disagg.errors import RankError, WorkerUnavailable
from plait_disagg.messages.hot_rows import RowReceiver
from plait_disagg.messages.layout import layout_of_crossing, layouts_of
from plait_disagg.messages.wire import (
    VERSION,
    DenseAsk,
    answers_message,
    card_payload,
    check_role,
    failures_header,
    parse_dense,
)
from plait_disagg.protocols import DenseHalf
from plait_disagg.queue.batch import cut
from plait_disagg.queue.jobs import as_rank_error
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.loop import BatchLoop
from plait_disagg.refresh.prepared_update import KEPT, PreparedUpdate
from plait_disagg.values import ModelCard, RankAnswer, RankTimings
from plait_disagg.workers.base import ServedWorker
from plait_fabric import FabricError, Listener, Message
from plait_fabric.rpc.fields import WireError
from plait_fabric.rpc.server import Peer, ServerProtocol

_CATCH_UP_S = 1.0
"""The min interval between two searches for a version that is not loaded."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Dense:
    """One batch of a CN, an `Item`. Its tensors may view `message`, which is released with the answer."""

    peer: Peer
    message: Message
    ask: DenseAsk
    rows: int
    request_ids: tuple[str, ...]
    alone: bool
    came_s: float
    due_s: float | None
    lost_s: float | None

    @property
    def gone(self) -> bool:
        return self.peer.channel.closed

    def fail(self, error: RankError) -> None:
        self.message.release()
        self.peer.send(failures_header([(self.ask.number, error)]))


class HnWorker(ServedWorker):
    """Serves the dense half to CNs. Owns the listeners."""

    def __init__(
        self,
        card: ModelCard,
        dense: Mapping[str, DenseHalf],
        listeners: Sequence[Listener],
        *,
        catch_up: Callable[[], None] | None = None,
        knobs: WorkerKnobs | None = None,
    ) -> None:
        """Start the worker at once.

        `dense`: the halves that CNs may request by dense version, newest last; `catch_up` is called, on the compute
        thread, when a CN requests a version that is not here, and may `prepare` and `apply_update` it.
        """
        self._held = (*dense.items(),)[-KEPT:]
        self._prepared: tuple[tuple[str, DenseHalf], ...] = ()
        self._catch_up = catch_up
        self._caught_up_s = float("-inf")
        self._busy_s = 0.0
        self._stay_s = 0.0
        self._windows: dict[int, int] = {}  # as each CN said last
        self._crossing = layout_of_crossing(self._held[-1][1].crossing, card.inputs)
        self._outputs = layouts_of(card).outputs
        self._hot: dict[int, RowReceiver] = {}  # by number of the peer; each is its thread's own
        self._loop: BatchLoop[_Dense] = BatchLoop(
            self._work, name=f"hn {card.name}", knobs=knobs or WorkerKnobs(), clock=time.monotonic, refuses=False
        )
        self.heartbeat = self._loop.heartbeat
        protocol = ServerProtocol(
            version=VERSION,
            on_hello=partial(check_role, role="dense"),
            welcome=lambda: card_payload(card, self._crossing),
            on_message=self._on_message,
            on_lost=self._on_lost,
        )
        self._serve(protocol, listeners, name="dense")

    @property
    def alive(self) -> bool:
        """False when the process must be replaced."""
        return super().alive and self._loop.alive

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Apply new knobs from the next batch on."""
        self._loop.reconfigure(knobs)

    def prepare(self, change: PreparedUpdate) -> None:
        """Make a new dense version available beside the current one."""
        self._prepared = () if change.dense is None else ((change.dense_version, change.dense),)

    def apply_update(self, change: PreparedUpdate) -> None:
        """Switch to the prepared version. The last two dense versions stay, because CNs switch one after the other."""
        if change.dense is not None:
            self._held = (*self._held, (change.dense_version, change.dense))[-KEPT:]
        self._prepared = ()  # last: a batch must find its version at every moment

    def ready(self) -> str | None:
        """Return None if a batch would be computed now."""
        return None if self.alive else "the compute thread has died"

    def metrics(self) -> Mapping[str, float]:
        """Return the worker's metrics.

        `asked_total` batches of CNs were computed as `batches_total`; they waited `queued_seconds_total`, and spent
        `stay_seconds_total` here in all. `window`: how many batches CNs may have here now. Then the dense half's.
        """
        loop = self._loop
        return {
            "asked_total": loop.items,
            "batches_total": loop.batches,
            "rows_total": loop.rows,
            "waiting": loop.waiting,
            "queued_seconds_total": loop.queued_s,
            "busy_seconds_total": self._busy_s,
            "stay_seconds_total": self._stay_s,
            "window": sum(self._windows.values()),
            "cns": self.channels,
            **self._held[-1][1].metrics(),
        }

    def stop(self, *, drain_s: float) -> None:
        """Accept no new CN, answer within `drain_s` what has arrived, and close the channels. Idempotent."""
        self._server.close_listeners()
        self._loop.close()
        if not self._loop.join(drain_s):
            self._loop.abandon(WorkerUnavailable("the HN was stopped"))
        self._server.hang_up()

    def _on_message(self, peer: Peer, message: Message) -> None:
        try:
            ask = self._with_rows(peer, parse_dense(message.header, message.buffers, self._crossing))
            item = _Dense(
                peer=peer,
                message=message,
                ask=ask,
                rows=sum(ask.candidates),
                request_ids=ask.requests,
                alone=not ask.mergeable,
                came_s=time.monotonic(),
                due_s=ask.due_s,
                lost_s=ask.lost_s,
            )
            self._windows[peer.number] = ask.window
        except BaseException:
            message.release()
            raise
        try:
            if ask.open > 1 or not self._loop.run_here(item):
                self._loop.put(item)
        except RankError as error:
            item.fail(error)

    def _with_rows(self, peer: Peer, ask: DenseAsk) -> DenseAsk:
        """Decode the rows of a batch on arrival, not when it is computed.

        Caches follow the order of the messages, and a slot may hold another row by then.
        """
        if ask.hot is None:
            return ask
        receiver = self._hot.setdefault(peer.number, RowReceiver())
        try:
            return replace(ask, crossing=receiver.decode(ask.crossing, ask.hot))
        except ValueError as error:
            raise WireError(f"hot rows: {error}") from error

    def _on_lost(self, peer: Peer) -> None:
        self._hot.pop(peer.number, None)
        self._windows.pop(peer.number, None)

    # On the compute thread.

    def _work(self, items: list[_Dense]) -> None:
        versions = {item.ask.dense_version for item in items}
        if len(versions) > 1:  # for a moment, while CNs change over
            for item in items:
                try:
                    self._work([item])
                except Exception as error:
                    item.fail(as_rank_error(error))
            return
        dense = self._dense(versions.pop())
        began_s = time.monotonic()
        candidates = [count for item in items for count in item.ask.candidates]
        outputs = dense.run(_end_to_end(items), candidates)
        seconds = time.monotonic() - began_s
        self._busy_s += seconds
        on_cpu = {name: output.detach().cpu() for name, output in outputs.items()}
        for item, mine in zip(items, cut(on_cpu, [item.rows for item in items]), strict=True):
            self._answer(item, mine, began_s, seconds)
            item.message.release()  # only now: an output may be a view of what crossed

    def _dense(self, version: str) -> DenseHalf:
        """Return the dense half of that version. Raises `WorkerUnavailable` if it is not here and cannot be loaded."""
        found = self._find(version)
        now_s = time.monotonic()
        if found is None and self._catch_up is not None and now_s - self._caught_up_s > _CATCH_UP_S:
            self._caught_up_s = now_s
            with self.heartbeat.unhurried("loading a newer version"):
                self._catch_up()
            found = self._find(version)
        if found is None:
            held = ", ".join(name for name, _ in self._held)
            raise WorkerUnavailable(f"the HN holds dense versions {held}, not {version}")
        return found

    def _find(self, version: str) -> DenseHalf | None:
        return next((dense for name, dense in (*self._prepared, *self._held) if name == version), None)

    def _answer(self, item: _Dense, outputs: Mapping[str, torch.Tensor], began_s: float, seconds: float) -> None:
        """Send the answer. Never raises: others of the batch may already have their answers."""
        self._stay_s += began_s + seconds - item.came_s
        try:
            timings = RankTimings(queued_ms=(began_s - item.came_s) * 1e3, dense_ms=seconds * 1e3)
            answer = RankAnswer(outputs=outputs, timings=timings)
            message = answers_message([(item.ask.number, answer)], self._outputs, item.peer.pool)
        except FabricError as error:
            item.peer.drop(error)
        except Exception as error:
            item.peer.send(failures_header([(item.ask.number, as_rank_error(error))]))
        else:
            item.peer.send(*message)


def _end_to_end(items: Sequence[_Dense]) -> Mapping[str, torch.Tensor]:
    """Join several batches into one: rows of users and rows of candidates each keep the order of the requests."""
    first = items[0].ask.crossing
    if len(items) == 1:
        return first
    return {name: torch.cat([item.ask.crossing[name] for item in items]) for name in first}
