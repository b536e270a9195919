"""The host cache of LoRA files: over a `LoraSource`, with concurrent loads.

Loading starts at `acquire`, on loader threads, several names at once and every name once. `cache_policy` decides
what stays in memory and whose set comes next; this module adds the threads, the futures and the parsed values. A set
that others wait for is only asked back: whoever holds it gives it back where it can do without. One larger than the
whole budget is refused with a clear error: the budget guards the host, and a request that can only run by exceeding
it would do so at the worst time. Failures are not remembered: a repaired file works at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from plait_kernels.cores import usable_cores
from plait_kernels.threads import set_threads
from plait_serving.diffusion.errors import EngineError, EngineStopped, LoraError
from plait_serving.diffusion.lora.cache_policy import CachePolicy, Key
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.lora.source import LoraEntry, LoraSource, not_found
from plait_serving.diffusion.queue.shares import TurnQueue
from plait_serving.diffusion.values import Tenant

_log = logging.getLogger(__name__)

LOADER_THREADS = 8
"""They wait for disk or network most of the time. A local file has to wait only if this many downloads hang."""

_CORES_A_PARSER = 2
"""Parsing holds the interpreter, which steps need at each of their operations: eight threads at once delayed each of
them by eight turns."""

_LOADING_SHARE = 0.2
"""Of the time that tenants take turns in: a turn is so much longer than loading a set."""

_SHORTEST_TURN_S, _LONGEST_TURN_S = 0.1, 10.0
"""Steps with a set that is new have a cost beside loading it; and nobody is to wait for a slow store's sake."""

Deliveries: TypeAlias = "list[tuple[Future[LoraLease], LoraLease | EngineError]]"
"""What to deliver once the lock is released: callbacks of futures run code that is not ours."""


@dataclass(slots=True, kw_only=True)
class CacheStatistics:
    """Counts since the start; `resident_bytes`, `resident`, `in_use` and `waiting_sets` are current values.

    A hit is a name that was in memory or loading when its set was admitted.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    resident_bytes: int = 0
    resident: int = 0
    in_use: int = 0
    waiting_sets: int = 0


@dataclass(slots=True, eq=False)
class LoraLease:
    """A LoRA set held in host memory; nothing in it is evicted before `release`, which may be called again.

    `give_back` releases the set and waits for the same files again; it returns None, and nothing is done, if nobody
    waits for it any more. `is_asked_back`: others wait for it, as of the cache's last `update_turns`."""

    weights: Mapping[str, LoadedLora]
    release: Callable[[], None]
    give_back: Callable[[], Future[LoraLease] | None]
    is_asked_back: bool = False


class LoraCache:
    """The cache that the module docstring describes. `parse` turns a file into weights matched to the model family; it
    may raise."""

    def __init__(
        self,
        source: LoraSource,
        parse: Callable[[str, Path], LoadedLora],
        *,
        host_bytes: int,
        threads: int = LOADER_THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._parse = parse
        self._clock = clock
        self._lock = threading.Lock()
        self._policy = CachePolicy(host_bytes)
        self._values: dict[Key, LoadedLora] = {}
        self._promised: dict[int, Future[LoraLease]] = {}
        self._leases: dict[int, LoraLease] = {}
        self._tickets = 0
        self._to_fetch: TurnQueue[Key] = TurnQueue()
        self._to_parse: TurnQueue[tuple[Key, Path, float]] = TurnQueue()
        self._counts = CacheStatistics()
        self._load_s = 0.0  # over all threads
        self._closed = False
        self._fetchers = ThreadPoolExecutor(threads, "plait-lora-fetch")
        # One torch thread each: parsing must not fight the compute thread for cores.
        parsers = max(1, usable_cores() // _CORES_A_PARSER)
        self._parsers = ThreadPoolExecutor(parsers, "plait-lora", initializer=set_threads, initargs=(1,))

    def __contains__(self, name: object) -> bool:
        """Return whether a LoRA of that name exists now."""
        return isinstance(name, str) and self._source.find(name) is not None

    def acquire(self, names: Sequence[str], tenant: Tenant) -> Future[LoraLease]:
        """Start loading a set; never blocks. The future fails with `NotFound`, `LoraError` or `EngineStopped`.

        Cancelling the future releases the set; loads that already run complete and stay in the cache.
        """
        future: Future[LoraLease] = Future()
        try:
            wanted = {Key(entry.name, entry.stamp): entry.nbytes for entry in map(self._entry, dict.fromkeys(names))}
            with self._change():
                if self._closed:
                    raise EngineStopped("the engine is shutting down")
                if not self._policy.fits_ever(wanted):
                    raise self._too_large(wanted)
                self._policy.enter(self._promise(future), wanted, tenant)
        except EngineError as error:
            future.set_exception(error)
        return future

    def update_turns(self) -> None:
        """Look whose turn it is now, if any set waits; leases then say whether they are asked back."""
        if self._policy.waiting:
            with self._change():
                pass

    def reconfigure(self, *, host_bytes: int) -> None:
        """Set the budget. Idle entries are evicted until it is met; waiting sets that can no longer fit fail."""
        with self._change() as deliveries:
            self._policy.resize(host_bytes)
            for ticket in self._policy.waiting:
                wanted = self._policy.claim(ticket).wanted
                if not self._policy.fits_ever(wanted):
                    self._policy.withdraw(ticket)
                    deliveries.append((self._promised.pop(ticket), self._too_large(wanted)))

    def statistics(self) -> CacheStatistics:
        """Return a consistent snapshot."""
        with self._lock:
            return replace(
                self._counts,
                resident_bytes=sum(value.nbytes for value in self._values.values()),
                resident=len(self._values),
                in_use=sum(1 for key in self._values if self._policy.users(key)),
                waiting_sets=len(self._policy.waiting),
            )

    def resident_names(self) -> frozenset[str]:
        """Return the names of the files in memory."""
        with self._lock:
            return frozenset(key.name for key in self._values)

    def close(self) -> None:
        """Fail what is in flight with `EngineStopped` and let the loader threads end. Idempotent."""
        with self._change() as deliveries:
            self._closed = True
            stopped = EngineStopped("the engine is shutting down")
            deliveries += [(future, stopped) for future in self._promised.values()]
            self._promised.clear()
        self._source.close()
        for pool in (self._fetchers, self._parsers):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- under the lock -------------------------------------------------------------------------------------------

    def _entry(self, name: str) -> LoraEntry:
        entry = self._source.find(name)
        if entry is None:
            raise not_found(name)
        return entry

    @contextmanager
    def _change(self) -> Iterator[Deliveries]:
        """Hold the lock; then admit the sets for which there is room now, let go of what was evicted, and deliver
        without the lock."""
        deliveries: Deliveries = []
        with self._lock:
            self._policy.pass_time(self._clock())
            yield deliveries
            if not self._closed:
                self._admit_waiting(deliveries)
            for key in [key for key in self._values if not self._policy.is_loaded(key)]:
                del self._values[key]
                self._counts.evictions += 1
        for future, delivered in deliveries:
            is_wanted = future.set_running_or_notify_cancel()
            if isinstance(delivered, EngineError):
                if is_wanted:
                    future.set_exception(delivered)
            elif is_wanted:
                future.set_result(delivered)
            else:
                delivered.release()

    def _promise(self, future: Future[LoraLease]) -> int:
        """Return the ticket of a set that is to be delivered."""
        self._tickets += 1
        ticket = self._tickets
        self._promised[ticket] = future
        future.add_done_callback(lambda done: self._abandon(ticket) if done.cancelled() else None)
        return ticket

    def _too_large(self, wanted: Mapping[Key, int]) -> LoraError:
        need_bytes, budget_bytes = sum(wanted.values()), self._policy.budget_bytes
        return LoraError(
            f"this LoRA set takes {need_bytes} bytes of host memory; host_lora_bytes allows {budget_bytes}",
            param="loras",
        )

    def _admitted(self, ticket: int, to_load: Sequence[Key], deliveries: Deliveries) -> None:
        claim = self._policy.claim(ticket)
        self._counts.misses += len(to_load)
        self._counts.hits += len(claim.wanted) - len(to_load)
        for key in to_load:
            self._to_fetch.put(claim.tenant.name, key)
            self._fetchers.submit(self._fetch)
        self._deliver_loaded(ticket, deliveries)

    def _admit_waiting(self, deliveries: Deliveries) -> None:
        mean_s = self._load_s / max(1, self._counts.misses)
        load_s = mean_s * max((len(self._policy.claim(ticket).wanted) for ticket in self._promised), default=0)
        self._policy.turn_s = min(max(load_s / _LOADING_SHARE, _SHORTEST_TURN_S), _LONGEST_TURN_S)
        for ticket, to_load in self._policy.admit_waiting():
            self._admitted(ticket, to_load, deliveries)
        for ticket, lease in self._leases.items():
            lease.is_asked_back = ticket in self._policy.asked_back

    def _deliver_loaded(self, ticket: int, deliveries: Deliveries) -> None:
        """Deliver a set, if it is admitted and in memory."""
        if not self._policy.is_ready(ticket):
            return
        weights = MappingProxyType({key.name: self._values[key] for key in self._policy.claim(ticket).wanted})
        lease = LoraLease(weights, lambda: self._release(ticket), lambda: self._give_back(ticket))
        self._leases[ticket] = lease
        deliveries.append((self._promised.pop(ticket), lease))

    # ---- events ---------------------------------------------------------------------------------------------------

    def _release(self, ticket: int) -> None:
        with self._change():
            if self._leases.pop(ticket, None) is not None:
                self._policy.release(ticket)

    def _give_back(self, ticket: int) -> Future[LoraLease] | None:
        again: Future[LoraLease] = Future()
        with self._change():
            if ticket not in self._policy.asked_back:
                return None
            self._policy.give_back(ticket, self._promise(again))
            del self._leases[ticket]
        return again

    def _abandon(self, ticket: int) -> None:
        """Give up a set whose future was cancelled; if it was delivered at the same moment, the delivery releases it
        instead."""
        with self._change():
            if self._promised.pop(ticket, None) is not None:
                self._policy.withdraw(ticket)

    def _fetch(self) -> None:
        """Fetch one file: of the tenant that has waited longest for one."""
        waiting = self._to_fetch.take()
        assert waiting is not None
        tenant, key = waiting
        with self._failing(key):
            started_s = self._clock()
            path = self._source.fetch(key.name)
            self._to_parse.put(tenant, (key, path, self._clock() - started_s))
            with self._lock:
                if not self._closed:
                    self._parsers.submit(self._load)

    def _load(self) -> None:
        """Parse one fetched file, by the same turns."""
        waiting = self._to_parse.take()
        assert waiting is not None
        key, path, fetch_s = waiting[1]
        with self._failing(key):
            started_s = self._clock()
            value = self._parse(key.name, path)
            entry = self._source.find(key.name)
            if entry is None or entry.stamp != key.stamp:
                raise LoraError(f"LoRA {key.name!r}: the file changed while it was loaded; ask again", param="loras")
            self._loaded(key, value, fetch_s + self._clock() - started_s)

    @contextmanager
    def _failing(self, key: Key) -> Iterator[None]:
        """Have what is raised fail the load."""
        try:
            yield
        except EngineError as error:
            self._failed(key, error)
        except Exception as error:
            _log.exception("LoRA %r could not be loaded", key.name)
            self._failed(key, LoraError(f"LoRA {key.name!r}: cannot be loaded ({error!r})", param="loras"))

    def _loaded(self, key: Key, value: LoadedLora, load_s: float) -> None:
        with self._change() as deliveries:
            self._load_s += load_s
            # What was made of a file (factors, programs) holds for one that is loaded again, whose content is the same.
            self._values[key] = replace(value, token=key)
            self._policy.loaded(key, value.nbytes)
            for ticket in list(self._promised):
                self._deliver_loaded(ticket, deliveries)

    def _failed(self, key: Key, error: EngineError) -> None:
        with self._change() as deliveries:
            for ticket in self._policy.failed(key):
                if (future := self._promised.pop(ticket, None)) is not None:  # it was not closed
                    deliveries.append((future, error))
