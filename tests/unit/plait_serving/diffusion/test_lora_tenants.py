"""LoRAs across tenants: an engine over fakes in virtual time, with the real cache of real files. Loading takes none.

The budget is seven files; a call of the denoiser takes a second.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter

import pytest

from fakes.lora_source import DelayedSource
from fakes.virtual_engine import Virtual
from plait_serving.diffusion.errors import DeadlineMissed, Overloaded
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.values import Failed, Finished, LoraRef, Progress, Tenant
from support.engine import WAIT_S, Gate, request
from support.loras import TwoLayers, tiny_lora_file

TARGETS = LoraTargets.of({"unet": TwoLayers()})
BUDGET = 7
VICTIM = Tenant(name="victim")
STEPS = 4


def loras(first: str, count: int = 1) -> tuple[LoraRef, ...]:
    """A set of so many LoRAs; those of another letter are others."""
    return tuple(LoraRef(name=f"{first}{i}", scale=0.5) for i in range(count))


class World(Virtual):
    """A virtual engine over a folder of LoRAs "a0" to "vd", which steps from `go` on; `seen` has what tenants held in
    each call, in files, and who waited."""

    def __init__(self, folder, **engine) -> None:
        self.gate = Gate()
        self.go = self.gate.release_all
        for letter in "abcdv":
            for i in range(14):
                tiny_lora_file(folder, f"{letter}{i:x}", seed=i)
        file_bytes = (folder / "a0.safetensors").stat().st_size
        self.file_bytes = file_bytes
        self.source = DelayedSource(FolderSource(folder))
        self.cache = LoraCache(
            self.source,
            lambda name, path: dataclasses.replace(parse(name, path, TARGETS), nbytes=file_bytes),
            host_bytes=BUDGET * file_bytes,
            clock=lambda: self.now_s,
        )
        self.seen: list[tuple[Counter, set[str]]] = []
        self.ends: dict[str, tuple[float, object]] = {}
        self.ended = threading.Condition()
        super().__init__(
            lambda rows: 1.0, provider=self.cache, gate=self.gate, largest_batch=1, queue_seconds=1e9, **engine
        )
        self.rig.denoiser.taken = {f"{letter}{i:x}" for letter in "abcdv" for i in range(14)}

    def take(self, calls):
        until_s = time.monotonic() + WAIT_S
        while any(ticket in self.cache._policy._held for ticket in list(self.cache._promised)):
            assert time.monotonic() < until_s
            time.sleep(0.0005)
        with self.cache._lock:
            policy = self.cache._policy
            held = {name: sum(keys.values()) // self.file_bytes for name, keys in policy._by_tenant().items()}
            self.seen.append((Counter(held), {claim.tenant.name for claim in policy._waiters.values()}))
        return super().take(calls)

    def send(self, name, tenant, wanted, **more):
        """Submit; its end is in `ends`, with the virtual seconds until its last step."""
        asked_s, stepped = self.now_s, []

        def sink(event):
            if isinstance(event, Progress) and event.step == event.steps:
                stepped.append(self.now_s - asked_s)
            if isinstance(event, Finished | Failed):
                with self.ended:
                    self.ends[name] = (stepped[0] if stepped else 0.0, event)
                    self.ended.notify_all()

        return self.rig.engine.submit(request(name, tenant=tenant, loras=wanted, **more), sink)

    def wait(self, *names):
        """Return how the requests ended."""
        self.go()
        with self.ended:
            assert self.ended.wait_for(lambda: all(name in self.ends for name in names), WAIT_S), "no end"
        return [self.ends[name] for name in names]


@pytest.fixture
def world(request, tmp_path):
    """A `World` with an engine of the parameters; it is stopped at the end."""
    made = World(tmp_path, **getattr(request, "param", {}))
    yield made
    made.go()
    made.rig.engine.stop(drain_s=0)


OF_ONE = pytest.mark.parametrize("world", [{"queue_limit": 1}], indirect=True)
"""An engine with room for one request."""


def flood(world, tenants, requests=1, letters="abc", steps=1000):
    """Requests of seven LoRAs: of several tenants with sets of their own, or several of world."""
    for i in range(max(tenants, requests)):
        tenant = Tenant(name=f"flood{i % tenants}")
        world.send(f"flood-{i}", tenant, loras(letters[i % len(letters)], BUDGET), steps=steps)


@pytest.mark.parametrize(("tenants", "requests"), [(1, 1), (1, 3), (3, 3), (1, 16)])
def test_a_set_of_one_lora_does_not_wait_for_a_thousand_steps(world, tenants, requests):
    """One, three and sixteen attackers, of one tenant and as three: at most three times its usual time,
    each time that it comes."""
    done = []

    def come():
        name = f"victim-{len(done)}"
        done.append(name)
        world.send(name, VICTIM, loras("v"), steps=STEPS)

    flood(world, tenants, requests)
    for call in (20, 60, 85, 110):
        world.at[call] = come
    ends = world.wait(*(f"victim-{i}" for i in range(4)))
    assert max(seconds for seconds, _ in ends) <= 3 * STEPS
    assert [event.result.images[0].dtype.name for _, event in ends] == ["uint8"] * 4


def test_short_requests_beside_a_thousand_steps_get_no_turns_between_the_steps_of_who_comes(world):
    """The thousand steps wait for room, and the other requests of their tenant are no shorter for that: who comes has
    its first request ahead of them."""
    flood(world, 1)

    def come():
        for i in range(10):
            world.send(f"short-{i}", Tenant(name="flood0"), (), steps=1)
        world.send("victim", VICTIM, loras("v"), steps=STEPS)

    world.at[20] = come
    [(seconds, _)] = world.wait("victim")
    assert seconds <= STEPS + 2


def test_no_tenant_holds_more_than_its_share_while_another_waits_for_its_own(world):
    """One tenant's seven sets of one LoRA, seven more behind them; another comes with five. From the next step on the
    other has three of seven, which is what fits into half, as long as both have more than that to do."""
    for i, letter in enumerate("aaaaaaabbbbbbb"):
        world.send(f"flood-{i}", Tenant(name="flood"), (LoraRef(name=f"{letter}{i % 7}"),), steps=40)
    world.at[20] = lambda: [world.send(f"v{i}", VICTIM, (LoraRef(name=f"v{i}"),), steps=40) for i in range(5)]
    world.wait("v0", "v1")
    before, arrives, after = world.seen[1:20], world.seen[20:24], world.seen[24:]
    assert {held["flood"] for held, _ in before} == {7}  # alone, a tenant uses all of it
    assert arrives[-1][0]["victim"] == 3
    both = [held for held, waits in after if waits == {"flood", "victim"}]
    assert both
    assert {held["victim"] for held in both} <= {2, 3}  # two in the step in which one has ended
    assert max(held["flood"] for held in both) <= 4
    assert min(held["flood"] for held in both) >= 3


def test_a_set_larger_than_its_share_has_its_turns_beside_one_that_never_stops(world):
    """Seven of seven LoRAs beside a tenant that always has one in use: neither waits for ever, and who holds a seventh
    has the more time."""
    count = [0]

    def next_one():
        count[0] += 1
        ticket = world.rig.engine.submit(
            request(f"v{count[0]}", tenant=VICTIM, loras=loras("v"), steps=STEPS),
            lambda event: next_one() if isinstance(event, Progress) and event.step == event.steps - 1 else None,
        )
        assert ticket

    next_one()
    world.at[5] = lambda: world.send("large", Tenant(name="large"), loras("a", BUDGET), steps=30)
    [(seconds, _)] = world.wait("large")
    assert seconds < 30 * 16
    calls = Counter("large" if held["large"] else "victim" for held, _ in world.seen)
    assert calls["victim"] >= 3 * calls["large"]


@pytest.mark.parametrize("are_inputs", [True, False])
def test_several_larger_than_their_shares_take_turns(world, are_inputs):
    """Three tenants with six requests each, of seven LoRAs and ten steps: none has to wait for all of another's. One
    that comes has a request ahead, so of 60 steps the last one has more than half when the first is done. All steps of
    each have its set, whether that is an input or merged, however often it has made room for others'."""
    if not are_inputs:
        world.rig.denoiser.taken = set()
    for i in range(18):
        world.send(f"{i}", Tenant(name=f"t{i % 3}"), loras("abc"[i % 3], BUDGET), steps=10)
    ends = world.wait(*(f"{i}" for i in range(18)))
    assert {int(event.result.images[0].max()) for _, event in ends} == {10 + 10 + 10 * BUDGET // 2}
    holders = [name for held, _ in world.seen for name in held]
    assert Counter(holders) == {"t0": 60, "t1": 60, "t2": 60}  # in each call, one
    first_end = next(i for i, name in enumerate(holders) if holders[: i + 1].count(name) == 60)
    assert min(Counter(holders[: first_end + 1]).values()) > 30


def test_a_deadline_holds_while_its_set_waits(world):
    """For room that its own tenant has, and for room that it made; nothing of it is left."""
    large = Tenant(name="large")
    world.send("first", large, loras("a", BUDGET), steps=100, deadline_s=130.0)
    world.at[3] = lambda: world.send("second", large, loras("b", BUDGET), steps=STEPS, deadline_s=20.0)
    for call in range(10, 200, 4):
        world.at[call] = lambda call=call: world.send(f"v{call}", VICTIM, loras("v"), steps=STEPS)
    ends = world.wait("second", "first")
    for _, event in ends:
        assert isinstance(event.error, DeadlineMissed)
    assert "0 of 4 steps" in ends[0][1].error.message
    with world.cache._lock:
        assert "large" not in world.cache._policy._tenants()


@OF_ONE
def test_a_refused_request_has_touched_no_lora(world):
    """With a full queue: ten with LoRAs that nobody used so far; nothing is fetched, nothing leaves the cache."""
    world.send("before", VICTIM, loras("b", BUDGET), steps=STEPS)
    world.wait("before")
    world.rig.denoiser.gate = gate = Gate()
    world.send("first", VICTIM, loras("b"), steps=STEPS)
    gate.wait_step()
    for i in range(10):
        with pytest.raises(Overloaded):
            world.send(f"more-{i}", VICTIM, (LoraRef(name=f"a{i}"),))
    statistics = world.cache.statistics()
    gate.release_all()
    assert sorted(world.source.fetched) == [f"b{i}" for i in range(BUDGET)]
    assert (statistics.misses, statistics.evictions, statistics.waiting_sets) == (BUDGET, 0, 0)
    world.wait("first")


@OF_ONE
def test_a_request_whose_set_can_not_be_asked_for_is_not_admitted(world):
    """An error of the store's listing is the caller's, and leaves the queue as it was."""
    world.source.find, find = lambda name: {}[name], world.source.find
    for _ in range(3):
        with pytest.raises(KeyError):
            world.send("broken", VICTIM, loras("v"))
    world.source.find = find
    world.send("whole", VICTIM, loras("v"))
    [(_, event)] = world.wait("whole")
    assert isinstance(event, Finished)
    assert world.rig.engine.statistics().accepted == 1
