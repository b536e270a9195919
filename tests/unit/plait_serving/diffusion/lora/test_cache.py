"""The host cache with its threads: what is concurrent, what is shared, what waits, and what every failure leaves."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch

from fakes.lora_source import DelayedSource
from plait_serving.diffusion.errors import EngineStopped, LoraError, NotFound
from plait_serving.diffusion.lora.cache import LoraCache, LoraLease
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.values import Tenant
from support.loras import TwoLayers, tiny_lora_file

torch.set_num_threads(1)

TARGETS = LoraTargets.of({"unet": TwoLayers()})
SOON_S = 60.0
ONE, OTHER = Tenant(name="one"), Tenant(name="other")


def as_large_as_its_file(name: str, path: Path) -> LoadedLora:
    """Parses; counts the header too, which is most of a tiny file, so that budgets can be given in files."""
    return dataclasses.replace(parse(name, path, TARGETS), nbytes=path.stat().st_size)


class Bench:
    """A folder of equally large LoRAs "a".."e", a source that can be held, and a cache."""

    def __init__(self, folder: Path, budget_files: float = 100, parses=as_large_as_its_file, **options) -> None:
        self.folder = folder
        for seed, name in enumerate("abcde"):
            tiny_lora_file(folder, name, seed=seed)
        self.file_bytes = (folder / "a.safetensors").stat().st_size
        self.source = DelayedSource(FolderSource(folder))
        self.cache = LoraCache(self.source, parses, host_bytes=int(budget_files * self.file_bytes), **options)

    def acquire(self, names, tenant=ONE) -> Future[LoraLease]:
        """A set of a tenant, on its way."""
        return self.cache.acquire(names, tenant)

    def lease(self, *names: str) -> LoraLease:
        """A set, loaded."""
        return self.acquire(names).result(SOON_S)


@pytest.fixture
def make(tmp_path):
    """Benches that are closed afterwards."""
    benches: list[Bench] = []

    def build(*budget_files: float, **options) -> Bench:
        benches.append(Bench(tmp_path / f"loras{len(benches)}", *budget_files, **options))
        return benches[-1]

    yield build
    for bench in benches:
        bench.cache.close()


def settled(future: Future[LoraLease]) -> bool:
    """Whether it is done within a moment; for futures that must not be."""
    return bool(wait([future], 0.05).done)


def test_a_set_arrives_whole(make):
    """All its files by name, parsed for this model, a name given twice once; an empty set is there at once."""
    bench = make(2)
    lease = bench.lease("a", "c", "a")
    assert [(name, weights.name) for name, weights in lease.weights.items()] == [("a", "a"), ("c", "c")]
    assert bench.cache.resident_names() == {"a", "c"}
    assert bench.cache.statistics().resident_bytes == 2 * bench.file_bytes
    assert dict(bench.acquire([]).result(0).weights) == {}


def test_distinct_names_load_at_the_same_time(make):
    """Of one set and of several; one that hangs is its own set's problem."""
    bench = make()
    bench.source.hold("a", "b", "c")
    futures = [bench.acquire(["a", "b"]), bench.acquire(["c"])]
    bench.source.wait_fetching(3)
    bench.lease("d", "e").release()
    assert not any(future.done() for future in futures)
    bench.source.let_go("a", "b", "c")
    for future in futures:
        future.result(SOON_S)


def test_one_name_is_loaded_once(make):
    """Ten requests for it while it loads, and later ones, share one load and one copy."""
    bench = make()
    bench.source.hold("a")
    futures = [bench.acquire(["a"]) for _ in range(10)]
    bench.source.wait_fetching(1)
    bench.source.let_go("a")
    leases = [future.result(SOON_S) for future in futures] + [bench.lease("a")]
    assert len({id(lease.weights["a"]) for lease in leases}) == 1
    assert bench.source.fetched == ["a"]
    statistics = bench.cache.statistics()
    assert (statistics.misses, statistics.hits) == (1, 10)


def test_released_sets_stay_until_room_is_needed(make):
    """Least recently used first; what is in use never leaves."""
    bench = make(3)
    held = bench.lease("a")
    bench.lease("b").release()
    bench.lease("c").release()
    bench.lease("b").release()  # c is now the oldest
    bench.lease("d").release()
    assert bench.cache.statistics().evictions == 1
    bench.lease("b").release()
    assert bench.source.fetched == ["a", "b", "c", "d"]
    bench.lease("c", "e").release()
    assert "a" in held.weights
    assert bench.lease("a").weights["a"] is held.weights["a"]


def test_releasing_twice_counts_once(make):
    """A lease let go twice does not free somebody else's entry."""
    bench = make(1)
    first, second = bench.lease("a"), bench.lease("a")
    first.release()
    first.release()
    waiting = bench.acquire(["b"])
    assert not settled(waiting)
    assert bench.cache.statistics().waiting_sets == 1
    second.release()
    waiting.result(SOON_S)


def test_a_set_larger_than_the_budget_is_refused(make):
    """At once, with both numbers; smaller ones go on."""
    bench = make(2)
    future = bench.acquire(["a", "b", "c"])
    with pytest.raises(LoraError, match=rf"{3 * bench.file_bytes} bytes .* allows {2 * bench.file_bytes}"):
        future.result(0)
    assert bench.source.fetched == []
    bench.lease("a", "b").release()


def test_unknown_names_are_not_found(make):
    """At once; nothing of the set is loaded."""
    bench = make()
    with pytest.raises(NotFound, match="'nobody'"):
        bench.acquire(["a", "nobody"]).result(0)
    assert bench.source.fetched == []
    assert "nobody" not in bench.cache
    assert "a" in bench.cache
    assert 3 not in bench.cache


def test_a_changed_file_is_loaded_anew(make):
    """The next request gets the new content; a running one keeps what it has, and the old one leaves after it."""
    bench = make()
    old = bench.lease("a")
    tiny_lora_file(bench.folder, "a", seed=99)
    new = bench.lease("a")
    assert old.weights["a"].token != new.weights["a"].token
    assert bench.cache.statistics().resident == 2
    old.release()
    assert bench.cache.statistics().resident == 1
    assert bench.lease("a").weights["a"] is new.weights["a"]


def test_a_failure_fails_every_set_that_needs_the_file_and_no_other(make):
    """Sets that share only good files with it go on; it works as soon as it is repaired."""
    bench = make()
    path = bench.folder / "a.safetensors"
    good_bytes = path.read_bytes()
    path.write_bytes(good_bytes[:-10])
    bench.source.hold("a", "b")
    bad = [bench.acquire(["a"]), bench.acquire(["b", "a"])]
    good = bench.acquire(["b"])
    bench.source.wait_fetching(2)
    bench.source.let_go("a", "b")
    for future in bad:
        with pytest.raises(LoraError, match="LoRA 'a'"):
            future.result(SOON_S)
    good.result(SOON_S).release()
    statistics = bench.cache.statistics()
    assert (statistics.in_use, statistics.resident) == (0, 1)
    path.write_bytes(good_bytes)
    assert set(bench.lease("a", "b").weights) == {"a", "b"}


@pytest.mark.parametrize(("how", "kind"), [("vanishes", NotFound), ("is replaced", LoraError)])
def test_a_file_that_goes_while_it_loads(make, how, kind):
    """What was announced is not what was read: an error, never the wrong content; asking again works."""
    bench = make()
    path = bench.folder / "a.safetensors"
    bench.source.hold("a")
    future = bench.acquire(["a"])
    bench.source.wait_fetching(1)
    other = tiny_lora_file(bench.folder, "other", seed=50)
    if how == "vanishes":
        path.unlink()
    else:
        other.replace(path)
    bench.source.let_go("a")
    with pytest.raises(kind):
        future.result(SOON_S)
    if how == "vanishes":
        other.replace(path)
    bench.lease("a")


def test_a_bug_in_the_parser_is_an_error_of_that_set(make, caplog):
    """A loader thread survives whatever happens in it."""
    bench = make(parses=lambda *_: 1 / 0)
    with pytest.raises(LoraError, match="ZeroDivisionError"):
        bench.acquire(["a"]).result(SOON_S)
    assert "could not be loaded" in caplog.text


# ---- cancelling -----------------------------------------------------------------------------------------------------


def test_cancelling_a_waiting_set_lets_the_next_go(make):
    """A set that gave up its place does not block those behind it."""
    bench = make(2)
    held = bench.lease("a")
    large = bench.acquire(["b", "c"])
    small = bench.acquire(["d"])
    assert not settled(small)
    assert large.cancel()
    assert list(small.result(SOON_S).weights) == ["d"]
    held.release()


def test_cancelling_one_of_two_keeps_the_load(make):
    """The other request gets its set."""
    bench = make()
    bench.source.hold("a")
    gone, stays = bench.acquire(["a"]), bench.acquire(["a"])
    assert gone.cancel()
    bench.source.let_go("a")
    assert list(stays.result(SOON_S).weights) == ["a"]


def test_cancelling_while_it_arrives_leaks_nothing(make):
    """Whoever wins the race between arrival and cancellation, no entry stays in use."""
    bench = make()
    for turn in range(60):
        name = "abcde"[turn % 5]
        future = bench.acquire([name])
        if turn % 2:
            time.sleep(0.0005 * (turn % 4))
        if not future.cancel():
            future.result(SOON_S).release()
        bench.cache.reconfigure(host_bytes=(1 if turn % 7 == 0 else 100) * bench.file_bytes)
    bench.cache.reconfigure(host_bytes=100 * bench.file_bytes)
    bench.lease(*"abcde").release()
    # Where the arrival was under way, the loader thread releases the set: soon, but not before `cancel` returns.
    until_s = time.monotonic() + SOON_S
    while bench.cache.statistics().in_use and time.monotonic() < until_s:
        time.sleep(0.001)
    assert bench.cache.statistics().in_use == 0


# ---- between tenants ------------------------------------------------------------------------------------------------


def test_who_holds_more_than_its_share_is_asked_and_waits_again(make):
    """It goes on with the same content once there is room, and is first of its tenant then."""
    bench = make(2)
    first, second = bench.lease("a", "b"), bench.acquire(["c"])
    assert not first.is_asked_back
    assert first.give_back() is None  # nobody else waits
    other = bench.acquire(["d"], OTHER)
    assert first.is_asked_back
    again = first.give_back()
    first.release()  # it is given back already
    lease = other.result(SOON_S)
    assert not again.done()
    assert not second.done()
    lease.release()
    assert list(again.result(SOON_S).weights) == ["a", "b"]
    assert not second.done()


def test_while_another_waits_nobody_takes_more_than_its_share_nor_gives_back_less(make):
    """Half of the memory is one's own: it gets no more while another waits, even where there is room, and is not asked
    for it as long as the other wants more than its half, and has not waited long."""
    bench = make(4, clock=lambda: 0.0)
    first, large = bench.lease("a"), bench.acquire(["b", "c", "d", "e"], OTHER)
    more = bench.acquire(["b", "c"])
    assert bench.cache.statistics().misses == 1  # no file was asked for since the first
    assert not first.is_asked_back
    assert first.give_back() is None
    first.release()
    more.result(SOON_S).release()
    assert len(large.result(SOON_S).weights) == 4


def test_a_file_that_was_replaced_meanwhile_does_not_go_on_as_another(make):
    """One image is never made with two contents of a LoRA."""
    now_s = [0.0]
    bench = make(1, clock=lambda: now_s[0])
    first, other = bench.lease("a"), bench.acquire(["b"], OTHER)
    now_s[0] += 60.0  # it has had its turn
    bench.cache.update_turns()
    again = first.give_back()
    tiny_lora_file(bench.folder, "a", seed=99)
    other.result(SOON_S).release()
    with pytest.raises(LoraError, match="the file changed"):
        again.result(SOON_S)


def test_what_was_made_of_a_file_holds_when_it_comes_back(make):
    """Equal content has one token, by which factors and programs are kept."""
    bench = make(1)
    first = bench.lease("a")
    token = first.weights["a"].token
    first.release()
    bench.lease("b").release()
    again = bench.lease("a")
    assert bench.source.fetched == ["a", "b", "a"]
    assert again.weights["a"].token == token


def test_files_of_tenants_are_loaded_in_turn(make):
    """However many files another has loaded, one's own is next."""
    bench = make(threads=1)
    bench.source.hold("a")
    flood = [bench.acquire([name]) for name in "abcd"]
    bench.source.wait_fetching(1)
    own = bench.acquire(["e"], OTHER)
    bench.source.let_go("a")
    for future in (own, *flood):
        future.result(SOON_S)
    assert bench.source.fetched.index("e") <= 2


def test_few_files_are_parsed_at_once_and_those_of_tenants_in_turn(make, monkeypatch):
    """Parsing holds the interpreter, which steps need: on two cores one thread does it, whatever has been fetched."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    begun, may_end = [], threading.Event()

    def parses(name, path):
        begun.append(name)
        assert may_end.wait(SOON_S)
        return as_large_as_its_file(name, path)

    bench = make(parses=parses)
    futures = [bench.acquire(["a", "b", "c", "d"]), bench.acquire(["e"], OTHER)]
    bench.source.wait_fetching(5)
    assert not settled(futures[1])
    assert len(begun) == 1
    may_end.set()
    for future in futures:
        future.result(SOON_S)
    assert begun.index("e") <= 2


# ---- budget and end -------------------------------------------------------------------------------------------------


def test_a_smaller_budget_evicts_what_is_idle(make):
    """What is in use stays until it is released, then the new budget holds."""
    bench = make(4)
    held = bench.lease("a", "b")
    bench.lease("c", "d").release()
    bench.cache.reconfigure(host_bytes=bench.file_bytes)
    assert bench.cache.statistics().resident == 2
    held.release()
    assert bench.cache.statistics().resident_bytes <= bench.file_bytes


def test_who_waits_hears_of_a_new_budget(make):
    """What can never fit any more fails; what fits now gets in, without anybody releasing anything."""
    bench = make(2)
    held = bench.lease("a", "b")
    large, small = bench.acquire(["c", "d"]), bench.acquire(["e"])
    bench.cache.reconfigure(host_bytes=bench.file_bytes)
    with pytest.raises(LoraError, match="host_lora_bytes"):
        large.result(0)
    assert not settled(small)
    bench.cache.reconfigure(host_bytes=3 * bench.file_bytes)
    small.result(SOON_S).release()
    held.release()


def test_close_fails_what_is_under_way(make):
    """Loading and waiting sets end with `EngineStopped`; so does a later acquire; leases can still be released."""
    bench = make(2)
    held = bench.lease("a")
    bench.source.hold("b")
    loading, waiting = bench.acquire(["b"]), bench.acquire(["c"])
    bench.source.wait_fetching(2)
    bench.cache.close()
    bench.cache.close()
    for future in (loading, waiting, bench.acquire(["d"])):
        with pytest.raises(EngineStopped):
            future.result(SOON_S)
    held.release()
