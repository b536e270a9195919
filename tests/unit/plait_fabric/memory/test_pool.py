"""The buffer pool: nothing overlaps, nothing is lost, misuse is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from plait_fabric import Lease, LeaseMisuse, PeerLost, Pool, PoolExhausted
from plait_fabric.memory.pool import ALIGNMENT_BYTES
from support.waiting import wait_for

CAPACITY_BYTES = 1 << 16


def _pool(capacity_bytes: int = CAPACITY_BYTES) -> Pool:
    return Pool(memoryview(bytearray(capacity_bytes)))


class PoolMachine(RuleBasedStateMachine):
    """Random acquiring, writing, handing over and releasing, checked against a plain list."""

    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.pool = _pool()
        self.live: dict[int, tuple[Lease, bytes]] = {}
        self.serial = 0

    @rule(target=leases, nbytes=st.one_of(st.integers(0, 300), st.integers(0, CAPACITY_BYTES + 100)))
    def acquire(self, nbytes: int) -> Lease:
        """Acquire and fill; a refusal leaves an inert lease in the bundle."""
        try:
            lease = self.pool.acquire(nbytes, 0.0)
        except PoolExhausted:
            spare = _pool(64).acquire(1)
            spare.release()
            return spare
        self._remember(lease)
        return lease

    def _remember(self, lease: Lease) -> None:
        self.serial = (self.serial + 1) % 251
        content = bytes([self.serial]) * lease.nbytes
        lease.memory[:] = content
        self.live[id(lease)] = (lease, content)

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        """Release once; any further release raises and changes nothing."""
        if self.live.pop(id(lease), None) is not None:
            lease.release()
        else:
            with pytest.raises(LeaseMisuse):
                lease.release()

    @rule(target=leases, lease=consumes(leases))
    def hand_over(self, lease: Lease) -> Lease:
        """A handed-over lease moves its memory; the old object is dead."""
        known = self.live.pop(id(lease), None)
        if known is None:
            with pytest.raises(LeaseMisuse):
                lease.hand_over()
            return lease
        moved = lease.hand_over()
        with pytest.raises(LeaseMisuse):
            lease.write(b"")
        self.live[id(moved)] = (moved, known[1])
        return moved

    @invariant()
    def _assert_no_overlap(self) -> None:
        """Every live lease still holds exactly what was written into it."""
        for lease, content in self.live.values():
            assert bytes(lease.memory) == content
            assert lease.offset % ALIGNMENT_BYTES == 0

    @invariant()
    def _assert_accounted(self) -> None:
        """The statistics agree with the plain list, and the pool stays within its bounds."""
        statistics = self.pool.statistics()
        assert statistics.leases == len(self.live)
        assert sum(lease.nbytes for lease, _ in self.live.values()) <= statistics.leased_bytes
        assert statistics.leased_bytes <= statistics.peak_leased_bytes <= statistics.capacity_bytes

    def teardown(self) -> None:
        """Everything comes back: the pool can lease its whole capacity again."""
        for lease, _ in self.live.values():
            lease.release()
        self.pool.acquire(self.pool.capacity_bytes, 0.0).release()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase


def test_refusals_are_explicit() -> None:
    """Without room `acquire` refuses after its time-out, be it none."""
    pool = _pool()
    with pool.acquire(CAPACITY_BYTES):
        for timeout_s in (0.0, 0.01):
            with pytest.raises(PoolExhausted) as caught:
                pool.acquire(1, timeout_s)
            assert caught.value.channel_usable
    assert pool.statistics().leases == 0
    with pytest.raises(ValueError, match="makes no sense"):
        pool.acquire(-1)


def test_shut_pool_wakes_whoever_waits() -> None:
    """When the channel ends, a waiting `acquire` raises the reason."""
    pool = _pool()
    pool.acquire(CAPACITY_BYTES)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.acquire, 1)
        wait_for(lambda: pool.statistics().waits)
        pool.shut(PeerLost("gone"))
        assert isinstance(waiting.exception(60.0), PeerLost)


def test_threads_share_a_pool() -> None:
    """Threads that acquire, fill, check and release wait for each other, and never see each other's bytes."""
    pool = _pool(1 << 14)
    failures: list[str] = []

    def work(mark: int) -> None:
        for step in range(300):
            with pool.acquire(64 + (mark * 37 + step * 101) % 3_000) as lease:
                lease.memory[:] = bytes([mark]) * lease.nbytes
                if set(lease.memory) != {mark}:
                    failures.append(f"thread {mark} step {step}")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.statistics().leases == 0
