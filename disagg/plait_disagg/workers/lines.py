"""The asking end of a channel, kept up: it dials, greets, receives answers, and dials again when the peer is lost.

A `Line` speaks to one replica; `Lines` to several, each question going where the fewest are open, and their number
follows that of the replicas. Questions leave from the caller's thread; answers come in on the line's own.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from plait_disagg.errors import RankError, WorkerUnavailable
from plait_disagg.messages.wire import SEND_S, Role, WireError, hello_header, parse_welcome
from plait_disagg.queue.order import Downstream
from plait_disagg.values import ModelCard
from plait_disagg.workers.server import GREET_S
from plait_fabric import Buffer, Channel, FabricError, FabricTimeout, Message, Pool, RecvTimeout
from plait_fabric.rpc.replicas import Link, NoReplica
from plait_fabric.threads import set_threads

__all__ = ["Backoff", "Connect", "Line", "Lines", "Link"]

_log = logging.getLogger(__name__)

_REST_S = 1.0
"""After a server said that it takes no more; by then it has hung up, or thought better of it."""

_LOOK_S = 1.0
"""How often a line that hears nothing looks whether an answer is overdue."""


Connect: TypeAlias = Callable[[frozenset[str]], Link]
"""A channel to a replica that is not among those. May block for seconds; raises `NoReplica`, `FabricError`."""

Pack: TypeAlias = Callable[[int, Pool], tuple[Mapping[str, Any], Sequence[Buffer]]]
"""Makes the message of a question from its number."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Waiting before the next dial: from ``first_s``, twice as long after each failure, at most ``most_s``; less up to
    half of it by lot, so that clients of one dead server do not come back together."""

    first_s: float = 0.1
    most_s: float = 2.0

    def after_s(self, failures: int, chance: random.Random) -> float:
        """Seconds after that many failures in a row (at least 1)."""
        wait_s = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return wait_s * (1.0 - 0.5 * chance.random())


class Line(Generic[T]):
    """One channel at a time. ``T`` is what the owner wants to remember of a question."""

    def __init__(
        self,
        connect: Callable[[Line[T]], Link],
        *,
        role: Role,
        name: str,
        on_up: Callable[[Line[T], ModelCard], None],
        on_message: Callable[[Line[T], Message], None],
        on_lost: Callable[[Line[T], list[T], str], None],
        answer_timeout_s: float,
        backoff: Backoff,
        chance: random.Random,
        window: int,
        wanted: Callable[[Line[T]], bool],
    ) -> None:
        """Starts to dial at once; ``connect`` also sets `replica`. The callbacks run on the line's thread: ``on_up``
        may refuse the server by raising `WireError`; ``on_message`` owns the message; ``on_lost`` gets the questions
        that will not be answered any more, and why; ``wanted`` is asked after every dial whether the line goes on."""
        self._connect = connect
        self._role: Role = role
        self._on_up = on_up
        self._on_message = on_message
        self._on_lost = on_lost
        self._answer_timeout_s = answer_timeout_s
        self._backoff = backoff
        self._chance = chance
        self._wanted = wanted
        self.window = window
        self._channel: Channel | None = None
        self._open: dict[int, tuple[T, float]] = {}
        self._next_number = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.replica = ""
        self.why_down = "not connected yet"
        self.rests_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether a question would be sent now."""
        return self._channel is not None

    @property
    def open_questions(self) -> int:
        """Questions without an answer yet."""
        return len(self._open)

    def ask(self, item: T, pack: Pack) -> int:
        """Sends a question and returns its number. Raises `WorkerUnavailable` (it was not taken), or what ``pack``
        raises.

        Once this returned, the owner hears of the item exactly once: by an answer that it `take`s, or by ``on_lost``.
        """
        with self._lock:
            channel = self._channel
            if channel is None:
                raise WorkerUnavailable(self.why_down)
            number = self._next_number
            self._next_number += 1
            self._open[number] = (item, time.monotonic())
        try:
            header, buffers = pack(number, channel.pool)
            channel.send(header, buffers, timeout_s=SEND_S)
        except FabricError as error:
            mine = self.take(number) is not None
            if error.channel_usable and not isinstance(error, FabricTimeout):
                raise RankError(f"the request does not fit the fabric: {error}") from error
            channel.close()
            if mine:  # else on_lost was faster and has it
                raise WorkerUnavailable(f"the worker was lost: {error}") from error
        except BaseException:
            self.take(number)
            raise
        return number

    def take(self, number: int) -> T | None:
        """The question of that number, once; None if it is not open (any more)."""
        with self._lock:
            found = self._open.pop(number, None)
        return None if found is None else found[0]

    def asked(self, number: int) -> bool:
        """Whether there ever was a question of that number: no two have the same, on whatever channel."""
        return number < self._next_number

    def withdraw(self, item: T) -> int | None:
        """Takes back an open question; its number, or None if it is not open here. Looks at all of them."""
        with self._lock:
            number = next((number for number, (open_item, _) in self._open.items() if open_item is item), None)
            if number is not None:
                del self._open[number]
        return number

    def rest(self) -> None:
        """The server takes no more, it is stopping: others are asked first for a while."""
        self.rests_until_s = time.monotonic() + _REST_S

    def tell(self, header: Mapping[str, Any]) -> None:
        """Sends what wants no answer, if there is somebody."""
        channel = self._channel
        if channel is not None:
            try:
                channel.send(header, timeout_s=SEND_S)
            except FabricError:
                channel.close()

    def close(self) -> None:
        """Hangs up for good; open questions are lost. Idempotent; waits for the thread."""
        self._stop.set()
        channel = self._channel
        if channel is not None:
            channel.close()
        if self._thread is not threading.current_thread():
            self._thread.join(GREET_S)

    # What follows runs on the line's thread.

    def _run(self) -> None:
        set_threads(1)
        failures = 0
        while not self._stop.is_set():
            try:
                channel = self._dial()
            except (NoReplica, FabricError, WireError) as error:
                self.replica = ""
                failures += 1
                self.why_down = str(error)
                if not self._wanted(self):
                    return
                self._stop.wait(self._backoff.after_s(failures, self._chance))
                continue
            failures = 0
            self._wanted(self)
            self._receive(channel)

    def _dial(self) -> Channel:
        """A greeted channel, already in use."""
        link = self._connect(self)
        try:
            link.channel.send(hello_header(self._role), timeout_s=SEND_S)
            with link.channel.recv(GREET_S) as message:
                welcome = parse_welcome(message.header)
            self._on_up(self, welcome.card)
        except BaseException:
            link.channel.close()
            raise
        with self._lock:
            self._channel = link.channel
        if self._stop.is_set():  # close() may have looked before there was a channel
            link.channel.close()
        _log.info("%s: connected to %s", self._thread.name, link.replica)
        return link.channel

    def _receive(self, channel: Channel) -> None:
        why = ""
        try:
            while True:
                try:
                    message = channel.recv(_LOOK_S)
                except RecvTimeout:
                    self._check_overdue()
                    continue
                self._on_message(self, message)
        except (FabricError, WireError) as error:
            why = str(error)
        except Exception as error:
            _log.exception("%s: an answer could not be taken", self._thread.name)
            why = f"internal error ({type(error).__name__})"
        channel.close()
        with self._lock:
            self._channel = None
            self.why_down = f"the worker was lost: {why}"
            lost = [item for item, _ in self._open.values()]
            self._open.clear()
        if not self._stop.is_set():
            _log.warning("%s: lost %s: %s", self._thread.name, self.replica, why)
        self.replica = ""
        self._on_lost(self, lost, self.why_down)

    def _check_overdue(self) -> None:
        with self._lock:
            oldest = next(iter(self._open.values()), None)
        if oldest is not None and time.monotonic() - oldest[1] > self._answer_timeout_s:
            raise WireError(f"no answer within {self._answer_timeout_s:g} s")


class Lines(Generic[T]):
    """Several lines, each to another replica.

    Where the number of replicas changes there are at least ``count`` lines and at most ``most``: one more than are up,
    so that there is always one that looks for a replica that is new, and no more than one.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        count: int,
        role: Role,
        name: str,
        on_up: Callable[[Line[T], ModelCard], None],
        on_message: Callable[[Line[T], Message], None],
        on_lost: Callable[[Line[T], list[T], str], None],
        most: int | None = None,
        window: int = 1,
        answer_timeout_s: float = 30.0,
        backoff: Backoff | None = None,
        chance: random.Random | None = None,
    ) -> None:
        """See `Line`. Lines dial one at a time, so that no two take the same replica. ``window``: how many questions
        may be open at a line; its owner may change that."""
        self._connect = connect
        self._dialling = threading.Lock()
        self._changing = threading.Lock()
        self._closed = False
        self._count, self._most = count, max(count, most or count)
        self._numbers = itertools.count()

        def make() -> Line[T]:
            return Line(
                self._connect_elsewhere,
                role=role,
                name=f"{name} line {next(self._numbers)}",
                on_up=on_up,
                on_message=on_message,
                on_lost=on_lost,
                answer_timeout_s=answer_timeout_s,
                backoff=backoff or Backoff(),
                chance=chance or random.Random(),
                window=window,
                wanted=self._wanted,
            )

        self._make = make
        self.all: tuple[Line[T], ...] = ()
        with self._dialling:  # a line that dials looks which replicas the others have
            self.all = tuple(self._make() for _ in range(count))

    @property
    def up(self) -> int:
        """Lines that can be asked now."""
        return sum(line.up for line in self.all)

    @property
    def open_questions(self) -> int:
        """Of all lines."""
        return sum(line.open_questions for line in self.all)

    @property
    def elsewhere(self) -> Downstream:
        """What the lines that can be asked now bear; open questions of all."""
        up = [(line.open_questions, line.window) for line in self.all if line.up]
        return Downstream(
            open=self.open_questions,
            idle=sum(not asked for asked, _ in up),
            room=sum(max(0, window - asked) for asked, window in up),
        )

    @property
    def why_down(self) -> str:
        """Why no line is up."""
        return "; ".join(sorted({line.why_down for line in self.all}))

    def best(self, *, full: bool = False) -> Line[T] | None:
        """The line that is up with the fewest open questions, fewer than its window unless it may be ``full``; one that
        rests only if all do."""
        usable = [line for line in self.all if line.up and (full or line.open_questions < line.window)]
        if len(usable) < 2:
            return usable[0] if usable else None
        now_s = time.monotonic()
        return min(usable, key=lambda line: (line.rests_until_s > now_s, line.open_questions))

    def close(self) -> None:
        """Hangs up for good."""
        with self._changing:
            self._closed = True
        for line in self.all:
            line.close()

    def _wanted(self, line: Line[T]) -> bool:
        """After a dial of ``line``: one more line if all are up; False, and it is forgotten, if it is one too many."""
        with self._changing:
            if self._closed:
                return True  # `close` ends it
            down = sum(not other.up for other in self.all)
            if not down and len(self.all) < self._most:
                self.all = (*self.all, self._make())
            if line.up or down < 2 or len(self.all) <= self._count:
                return True
            self.all = tuple(other for other in self.all if other is not line)
            return False

    def _connect_elsewhere(self, line: Line[T]) -> Link:
        with self._dialling:
            link = self._connect(frozenset(other.replica for other in self.all if other is not line) - {""})
            line.replica = link.replica
            return link
