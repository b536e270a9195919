"""The HN worker: crossing tensors of batches come in over channels from CNs, outputs go back.

Batches that wait at the same time are laid end to end and computed as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from plait_disagg.fabric import FabricError, Listener, Message
from plait_disagg.tables.cache import OutOfStep
from plait_disagg.workers.errors import RankError, Unavailable
from plait_disagg.workers.hot_rows import RowReceiver
from plait_disagg.workers.jobs import as_rank_error
from plait_disagg.workers.knobs import WorkerKnobs
from plait_disagg.workers.loop import ComputeLoop
from plait_disagg.workers.protocols import DenseHalf
from plait_disagg.workers.server import Peer, Server
from plait_disagg.workers.values import ModelCard
from plait_disagg.workers.wire import DenseAsk, WireError, done_message, failed_header, parse_dense

__all__ = ["HnWorker"]


@dataclass(slots=True, eq=False, kw_only=True)
class _Dense:
    """One batch of a CN. Its tensors may view ``message``, which is released with the answer."""

    peer: Peer
    message: Message
    ask: DenseAsk

    @property
    def rows(self) -> int:
        return sum(self.ask.candidates)

    @property
    def alone(self) -> bool:
        return not self.ask.mergeable

    def dropped(self, now_s: float) -> bool:  # noqa: ARG002  # deadlines are the CN's
        if self.peer.channel.closed:
            self.message.release()
            return True
        return False

    def fail(self, error: RankError) -> None:
        self.message.release()
        self.peer.send(failed_header(self.ask.number, error))


class HnWorker:
    """Serves the dense half to CNs. Owns the listeners."""

    def __init__(
        self,
        card: ModelCard,
        dense: DenseHalf,
        listeners: Sequence[Listener],
        *,
        knobs: WorkerKnobs | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts at once."""
        self._dense = dense
        self._clock = clock
        self._busy_s = 0.0
        self._hot: dict[int, RowReceiver] = {}  # by number of the peer; each is its thread's own
        self._loop: ComputeLoop[_Dense] = ComputeLoop(
            self._work, name=f"hn {card.name}", knobs=knobs or WorkerKnobs(), clock=clock
        )
        self._server = Server(
            card, listeners, role="dense", on_message=self._on_message, on_lost=self._on_lost, metrics=self.metrics
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens."""
        return self._server.addresses

    @property
    def alive(self) -> bool:
        """False when the process must be replaced."""
        return self._server.alive and self._loop.alive

    @property
    def channels(self) -> int:
        """CNs connected now."""
        return self._server.channels

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Holds from the next batch on."""
        self._loop.reconfigure(knobs)

    def ready(self) -> str | None:
        """None when a batch would be computed now."""
        return None if self.alive else "the compute thread has died"

    def metrics(self) -> Mapping[str, float]:
        """``asked_total`` batches of CNs were computed as ``batches_total``."""
        loop = self._loop
        return {
            "asked_total": loop.items,
            "batches_total": loop.batches,
            "rows_total": loop.rows,
            "waiting": loop.waiting,
            "busy_seconds_total": self._busy_s,
            "cns": self.channels,
        }

    def stop(self, *, drain_s: float) -> None:
        """Accepts no new CN, answers what has arrived within ``drain_s``, hangs up. Idempotent."""
        self._server.close_listeners()
        self._loop.close()
        if not self._loop.join(drain_s):
            self._loop.abandon(Unavailable("the HN was stopped"))
        self._server.hang_up()

    def _on_message(self, peer: Peer, message: Message) -> None:
        try:
            ask = self._with_rows(peer, parse_dense(message.header, message.buffers))
            item = _Dense(peer=peer, message=message, ask=ask)
        except BaseException:
            message.release()
            raise
        try:
            self._loop.put(item)
        except RankError as error:
            item.fail(error)

    def _with_rows(self, peer: Peer, ask: DenseAsk) -> DenseAsk:
        """Here and not when the batch's turn comes: caches follow the order of the messages, and a slot may hold
        another row by then."""
        if ask.hot is None:
            return ask
        receiver = self._hot.setdefault(peer.number, RowReceiver())
        try:
            return replace(ask, crossing=receiver.decode(ask.crossing, ask.hot))
        except (OutOfStep, ValueError) as error:
            raise WireError(f"hot rows: {error}") from error

    def _on_lost(self, peer: Peer) -> None:
        self._hot.pop(peer.number, None)

    # On the compute thread.

    def _work(self, items: list[_Dense]) -> None:
        began_s = self._clock()
        candidates = [count for item in items for count in item.ask.candidates]
        if len(items) == 1:
            outputs = self._dense.run(items[0].ask.crossing, candidates)
        else:
            outputs = self._dense.run(_end_to_end(items), candidates)
        seconds = self._clock() - began_s
        self._busy_s += seconds
        sizes = [item.rows for item in items]
        parts = {name: output.detach().cpu().split_with_sizes(sizes) for name, output in outputs.items()}
        for i, item in enumerate(items):
            self._answer(item, {name: part[i] for name, part in parts.items()}, seconds * 1e3)
            item.message.release()  # only now: an output may be a view of what crossed

    @staticmethod
    def _answer(item: _Dense, outputs: Mapping[str, torch.Tensor], dense_ms: float) -> None:
        """Never raises: others of the batch may have their answers already."""
        try:
            peer = item.peer
            header, buffers = done_message(item.ask.number, outputs, dense_ms, peer.pool, metrics=peer.metrics())
        except FabricError as error:
            item.peer.drop(error)
        except Exception as error:
            item.peer.send(failed_header(item.ask.number, as_rank_error(error)))
        else:
            item.peer.send(header, buffers)


def _end_to_end(items: Sequence[_Dense]) -> dict[str, torch.Tensor]:
    """One batch of several: rows of users and rows of candidates each keep the order of the requests."""
    first = items[0].ask.crossing
    return {name: torch.cat([item.ask.crossing[name] for item in items]) for name in first}
