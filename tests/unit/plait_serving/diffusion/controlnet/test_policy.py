"""The pure parts of ControlNets as a service: sessions, placement, the choice of a replica."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch

from plait_fabric import Unreachable
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import NoReplica, Replica, connect_to_one, in_order, worth_moving
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.controlnet.placement import (
    PlacementTrial,
    StepTimes,
    choose_placement,
    measure,
    probe_sizes,
    time_step_s,
)
from plait_serving.diffusion.controlnet.service import ServiceLimits
from plait_serving.diffusion.controlnet.sessions import SessionTable
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError
from plait_serving.diffusion.families.unet.controlnet import Constants
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import Conditioning, ControlCall, Residuals

CONDITIONING = Conditioning(text=torch.zeros(1, 1, 1), added={}, n=1)
IMAGE = np.zeros((2, 2, 3), dtype=np.uint8)


class Clock:
    """Time that is told to move."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _constants(floats: int) -> Constants:
    return Constants(embedding=torch.zeros(1, 1, 1, floats), conditioning=CONDITIONING)


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_sessions_of_peers_are_apart() -> None:
    """Two clients may use the same number; one that leaves takes only its own along."""
    table = SessionTable(capacity_bytes=1 << 20, idle_s=10, clock=Clock())
    first, second = _constants(1), _constants(1)
    table.put(1, 7, first)
    table.put(2, 7, second)
    assert table.get(1, 7) is first
    table.forget_peer(1)
    assert table.get(1, 7) is None
    assert table.get(2, 7) is second
    table.forget(2, 7)
    table.forget(2, 7)
    assert (len(table), table.nbytes) == (0, 0)


def test_least_recently_used_sessions_go_first_and_the_newest_stays() -> None:
    """Over the budget the oldest use goes; one session larger than the budget is still held."""
    table = SessionTable(capacity_bytes=5_000, idle_s=10, clock=Clock())
    for number in range(3):
        table.put(0, number, _constants(1))
    table.get(0, 0)
    table.put(0, 3, _constants(500))
    assert [number for number in range(4) if table.get(0, number) is not None] == [0, 3]
    assert table.nbytes <= 5_000
    table.put(0, 4, _constants(5_000))
    assert len(table) == 1
    table.put(0, 4, ModelError("small"))
    assert table.nbytes < 5_000


def test_idle_sessions_are_forgotten() -> None:
    """What nobody used for the idle time goes; what was used stays."""
    clock = Clock()
    table = SessionTable(capacity_bytes=1 << 20, idle_s=10, clock=clock)
    table.put(0, 0, _constants(1))
    table.put(0, 1, _constants(1))
    clock.now_s = 8.0
    table.get(0, 0)
    clock.now_s = 10.0
    table.forget_idle()
    assert (table.get(0, 1), len(table)) == (None, 1)


def test_limits_are_checked() -> None:
    """A service without room is a mistake in the configuration."""
    with pytest.raises(ValueError, match="channels"):
        ServiceLimits(channels=0)


# ---- placement ------------------------------------------------------------------------------------------------------


def test_auto_takes_what_measured_faster() -> None:
    """Remote wins when the ControlNet hides behind the encoder; local when both share cores or the wire is slow."""
    hidden = StepTimes(local_s=1.6, remote_s=1.0)
    choice = choose_placement(Placement.AUTO, local_possible=True, remote_possible=True, times=hidden)
    assert choice.placement is Placement.REMOTE
    assert "1600.0 ms local, 1000.0 ms remote" in choice.why
    shared = StepTimes(local_s=2.0, remote_s=2.2)
    assert (
        choose_placement(Placement.AUTO, local_possible=True, remote_possible=True, times=shared).placement
        is Placement.LOCAL
    )


def test_auto_without_a_choice() -> None:
    """AUTO takes what is possible, local if nothing was measured, and says so when nothing is possible."""
    assert choose_placement(Placement.AUTO, local_possible=False, remote_possible=True).placement is Placement.REMOTE
    assert choose_placement(Placement.AUTO, local_possible=True, remote_possible=False).placement is Placement.LOCAL
    assert choose_placement(Placement.AUTO, local_possible=True, remote_possible=True).placement is Placement.LOCAL
    with pytest.raises(ControlNetUnavailable):
        choose_placement(Placement.AUTO, local_possible=False, remote_possible=False)


@pytest.mark.parametrize("wanted", [Placement.LOCAL, Placement.REMOTE])
def test_explicit_choice_is_met_or_raises(wanted: Placement) -> None:
    """An explicit placement never falls back."""
    assert choose_placement(wanted, local_possible=True, remote_possible=True).placement is wanted
    with pytest.raises(ControlNetUnavailable, match=wanted.value):
        choose_placement(
            wanted, local_possible=wanted is not Placement.LOCAL, remote_possible=wanted is not Placement.REMOTE
        )


class FakeClient:
    """Takes a fixed time for a step; time passes only in here and in the encoder."""

    name = "edges"

    def __init__(self, clock: Clock, step_s: float, *, side_by_side: bool = False) -> None:
        self.clock, self.step_s, self.side_by_side = clock, step_s, side_by_side
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.stopped = 0
        self.away = False

    def open(self, **_: object) -> object:
        if self.away:
            raise ControlNetUnavailable("nobody")
        session = type("Session", (), {"controlnet": "edges"})()
        self.opened.append(session)
        return session

    def start(self, calls: list[ControlCall]) -> FakePending:
        return FakePending(self, len(calls), self.clock.now_s)

    def close(self, session: object) -> None:
        self.closed.append(session)

    def shutdown(self) -> None:
        self.stopped += 1


class FakePending:
    """Answers when `FakeClient.step_s` has passed since the start (side by side) or since the wait."""

    def __init__(self, client: FakeClient, calls: int, started_s: float) -> None:
        self.client, self.calls, self.started_s = client, calls, started_s

    def wait(self) -> list[Residuals]:
        clock = self.client.clock
        from_s = self.started_s if self.client.side_by_side else clock.now_s
        clock.now_s = max(clock.now_s, from_s + self.client.step_s)
        mid = torch.full((1, 1, 1, 1), self.client.step_s)
        return [Residuals(down=(), mid=mid)] * self.calls


def _call(session: object) -> ControlCall:
    return ControlCall(session=session, sample=torch.zeros(1, 4, 1, 1), timestep=torch.tensor(1), scale=1.0)


@pytest.mark.parametrize(("side_by_side", "seconds"), [(False, 1.5), (True, 1.0)])
def test_a_step_is_timed_with_the_encoder_half_in_between(side_by_side: bool, seconds: float) -> None:
    """A ControlNet that computes here comes on top of the encoder half; a service may hide behind it."""
    clock = Clock()

    def encoder() -> None:
        clock.now_s += 1.0

    client = FakeClient(clock, 0.5, side_by_side=side_by_side)
    assert time_step_s(client, _call(client.open()), encoder=encoder, clock=clock) == seconds


def test_probes_are_legal_sizes_up_to_the_model_s_own() -> None:
    """Edges are multiples; a tiny model is measured at the sizes that it has."""
    assert probe_sizes(512, 512, multiple=64) == ((128, 128), (256, 256), (512, 512))
    assert probe_sizes(1024, 768, multiple=64) == ((256, 192), (512, 384), (1024, 768))
    assert probe_sizes(64, 64, multiple=32) == ((32, 32), (64, 64))
    assert probe_sizes(64, 64, multiple=64) == ((64, 64),)


@pytest.mark.parametrize(
    ("second_per_pixel", "measured_at"),
    [
        (1.2e-5, [(128, 128), (512, 512)]),  # the model's own size fits the budget
        (3e-5, [(128, 128), (256, 256)]),
        (1e-4, [(128, 128), (128, 128)]),
        (1e-3, [(128, 128)]),  # the first call alone is over it
    ],
)
def test_measuring_a_slow_model_fits_the_budget(second_per_pixel: float, measured_at: list[tuple[int, int]]) -> None:
    """Each place is measured at most twice, the second time at the largest size that the budget allows."""
    clock, seen = Clock(), []

    def times_at(size: tuple[int, int]) -> StepTimes:
        seen.append(size)
        clock.now_s += size[0] * size[1] * second_per_pixel
        return StepTimes(local_s=float(len(seen)), remote_s=float(size[0]))

    times = measure(times_at, probe_sizes(512, 512, multiple=64), budget_s=4.0, clock=clock)
    assert seen == measured_at
    assert times == StepTimes(local_s=float(len(seen)), remote_s=float(measured_at[-1][0]))
    assert len(seen) == 1 or clock.now_s <= 4.0


def test_quick_steps_are_repeated_for_the_median() -> None:
    """One stall of the machine does not decide where the ControlNet of a small model runs."""
    clock, locals_s = Clock(), [9.0, 0.01, 0.3, 0.01, 0.02, 0.01]

    def times_at(_: object) -> StepTimes:
        clock.now_s += 0.03
        return StepTimes(local_s=locals_s.pop(0), remote_s=0.015)

    assert measure(times_at, [(64, 64)], budget_s=4.0, clock=clock) == StepTimes(local_s=0.01, remote_s=0.015)
    assert locals_s == []


def _placed(
    wanted: list[Placement], times: StepTimes | None = None
) -> tuple[MovableControlNetClient, FakeClient, FakeClient]:
    local, remote = FakeClient(Clock(), 1.0), FakeClient(Clock(), 2.0)
    client = MovableControlNetClient(
        "edges", local=lambda: local, remote=lambda: remote, wanted=lambda: wanted[0],
        measure=None if times is None else lambda *_: times,
    )  # fmt: skip
    return client, local, remote


def _open(client: MovableControlNetClient) -> object:
    return client.open(image=IMAGE, conditioning=CONDITIONING, width=8, height=8)


def test_placement_can_change_while_requests_run() -> None:
    """New sessions go where the knob says; old ones end where they began; one batch may ask both places."""
    wanted = [Placement.LOCAL]
    client, local, remote = _placed(wanted)
    first = _open(client)
    wanted[0] = Placement.REMOTE
    second = _open(client)
    assert (len(local.opened), len(remote.opened)) == (1, 1)
    answers = client.start([_call(second), _call(first), _call(object())]).wait()
    assert [float(answer.mid) for answer in answers[:2] if isinstance(answer, Residuals)] == [2.0, 1.0]
    assert isinstance(answers[2], ControlNetUnavailable)
    client.close(first)
    assert (local.closed, remote.closed) == (local.opened, [])
    client.shutdown()
    assert remote.stopped == 1


def test_auto_measures_once_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    """AUTO settles on the faster place at the first session and says which and why."""
    caplog.set_level(logging.INFO)
    client, local, remote = _placed([Placement.AUTO], StepTimes(local_s=2, remote_s=1))
    _open(client)
    _open(client)
    assert (len(local.opened), len(remote.opened)) == (0, 2)
    assert caplog.text.count("runs remote: measured 2000.0 ms local, 1000.0 ms remote") == 1
    assert client.times is not None


def test_auto_runs_here_while_the_service_that_it_chose_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """New sessions are not refused; they go back to the service when it is there. It is said once each way."""
    caplog.set_level(logging.INFO)
    wanted = [Placement.AUTO]
    client, local, remote = _placed(wanted, StepTimes(local_s=2, remote_s=1))
    before = _open(client)
    remote.away = True
    here = [_open(client), _open(client)]
    assert (len(local.opened), len(remote.opened)) == (2, 1)
    assert caplog.text.count("runs here while its service is away") == 1
    remote.away = False
    after = _open(client)
    answers = client.start([_call(session) for session in (before, *here, after)]).wait()
    assert [float(answer.mid) for answer in answers if isinstance(answer, Residuals)] == [2.0, 1.0, 1.0, 2.0]
    assert caplog.text.count("its service is back") == 1
    wanted[0] = Placement.REMOTE
    remote.away = True
    with pytest.raises(ControlNetUnavailable):
        _open(client)


def test_close_places_are_tried_with_sessions_of_users(caplog: pytest.LogCaptureFixture) -> None:
    """Measured alike, they take sessions in turn; then the one that was faster in steps that really ran gets all."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    places = {Placement.LOCAL: FakeClient(clock, 1.0), Placement.REMOTE: FakeClient(clock, 2.0)}
    client = MovableControlNetClient(
        "edges",
        local=lambda: places[Placement.LOCAL],
        remote=lambda: places[Placement.REMOTE],
        wanted=lambda: Placement.AUTO,
        measure=lambda *_: StepTimes(local_s=1.1, remote_s=1.0),
        clock=clock,
    )
    for _ in range(2):
        session = _open(client)
        for _ in range(4):
            client.start([_call(session)]).wait()
    assert [len(place.opened) for place in places.values()] == [1, 1]
    assert "runs" not in caplog.text
    assert client.place() is Placement.LOCAL
    assert client.times == StepTimes(local_s=1.0, remote_s=2.0)
    assert caplog.text.count("edges runs local: measured 1000.0 ms local, 2000.0 ms remote") == 1
    _open(client)
    assert [len(place.opened) for place in places.values()] == [2, 1]


def test_a_trial_ends_without_steps_that_compare() -> None:
    """Other shapes at each place say nothing; after eight sessions the measurement stands."""
    doubtful = StepTimes(local_s=1.0, remote_s=1.1)
    trial = PlacementTrial(doubtful)
    for number in range(8):
        assert trial.outcome is None
        place = trial.next_place()
        trial.opened(place)
        trial.record(place, number, 5.0)
    assert trial.outcome == doubtful
    assert not StepTimes(local_s=1.0, remote_s=2.0).is_close


def test_auto_survives_a_measurement_that_fails_and_tries_again() -> None:
    """While no replica answers the ControlNet runs here; AUTO measures again at later sessions, but not for ever."""
    local, remote = FakeClient(Clock(), 1.0), FakeClient(Clock(), 2.0)
    outcomes: list[StepTimes | None] = [None, None, StepTimes(local_s=2, remote_s=1)]

    def measured(*_: object) -> StepTimes:
        times = outcomes.pop(0)
        if times is None:
            raise ControlNetUnavailable("nobody")
        return times

    def placed() -> MovableControlNetClient:
        return MovableControlNetClient(
            "edges", local=lambda: local, remote=lambda: remote, wanted=lambda: Placement.AUTO, measure=measured
        )

    client = placed()
    assert [client.place() for _ in range(4)] == [Placement.LOCAL] * 2 + [Placement.REMOTE] * 2
    outcomes[:] = [None] * 4
    client = placed()
    assert [client.place() for _ in range(5)] == [Placement.LOCAL] * 5
    assert len(outcomes) == 1


# ---- replicas -------------------------------------------------------------------------------------------------------

REPLICAS = [
    Replica(name="near", host="me", addresses=("tcp://1.2.3.4:1", "shm:///s"), secret=b"1", channels=1),
    Replica(name="far", host="you", addresses=("shm:///t", "tcp://1.2.3.5:1"), secret=b"2", channels=1),
    Replica(name="idle", host="you", addresses=("tcp://1.2.3.6:1",), secret=b"3", channels=0),
]


def test_replicas_with_fewest_clients_first_then_near_ones() -> None:
    """Load decides, then the machine; shared memory is offered on one machine only, and first there."""
    tried = [address for _, address in in_order(REPLICAS, frozenset(), host="me", chance=random.Random(0))]
    assert tried == ["tcp://1.2.3.6:1", "shm:///s", "tcp://1.2.3.4:1", "tcp://1.2.3.5:1"]


def test_shared_memory_then_one_sided_then_tcp() -> None:
    """Of one replica's addresses the fastest that this machine may use is tried first, and the others after it."""
    addresses = ("tcp://1.2.3.4:1", "nixl://1.2.3.4:2", "shm:///s")
    replica = Replica(name="near", host="me", addresses=addresses, secret=b"1")
    for host, expected in (("me", addresses[::-1]), ("you", addresses[1::-1])):
        tried = in_order([replica], frozenset(), host=host, chance=random.Random(0))
        assert tuple(address for _, address in tried) == expected


def test_equal_replicas_are_spread_by_lot() -> None:
    """Clients that start together do not all pick the same replica."""
    equal = [Replica(name=str(i), host="me", addresses=(f"shm:///{i}",), secret=b"") for i in range(3)]
    chance = random.Random(1)
    firsts = {in_order(equal, frozenset(), host="me", chance=chance)[0][0].name for _ in range(50)}
    assert firsts == {"0", "1", "2"}  # false failure: 3 * (2/3)**50 < 1e-8, and the seed is fixed


def test_unreachable_replicas_are_passed_over() -> None:
    """The first that can be reached is taken; if none can, the error says why for each."""

    def dial(address: str, secret: bytes) -> object:
        if address != "tcp://1.2.3.5:1":
            raise Unreachable("nobody there")
        return address, secret

    link = connect_to_one(REPLICAS, frozenset(), host="me", chance=random.Random(0), dial=dial)
    assert (link.replica, link.channel) == ("far", ("tcp://1.2.3.5:1", b"2"))
    with pytest.raises(NoReplica, match="near at shm:///s: nobody there"):
        connect_to_one(REPLICAS, frozenset({"far"}), host="me", chance=random.Random(0), dial=dial)
    assert "b'1'" not in repr(REPLICAS)
    with pytest.raises(NoReplica, match="no other replica"):
        connect_to_one([], frozenset(), host="me", chance=random.Random(0), dial=dial)


def _with_clients(*counts: int) -> list[Replica]:
    return [Replica(name=str(i), host="h", addresses=(), secret=b"", channels=n) for i, n in enumerate(counts)]


def test_half_of_the_difference_moves() -> None:
    """Clients of a fuller replica go by lot; where that would not even things out, nobody goes."""
    chance = random.Random(0)
    moved = sum(worth_moving(_with_clients(10, 0), "0", chance=chance) for _ in range(1000))
    assert 420 < moved < 580  # p = 1/2; five standard deviations: false failure below 1e-6, and the seed is fixed
    for counts in ((1, 0), (1, 1), (3, 2), (0, 5), (4,)):
        assert not any(worth_moving(_with_clients(*counts), "0", chance=chance) for _ in range(50))
    assert not worth_moving(_with_clients(9, 0), "gone", chance=chance)


def test_backoff_doubles_up_to_its_bound() -> None:
    """The pause grows with failures in a row and stays bounded however many there are."""
    backoff = Backoff(first_s=0.5, max_s=3.0)
    assert [backoff.wait_s(n) for n in (1, 2, 3, 4, 10_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]
