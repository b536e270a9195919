"""The pure parts of ControlNets as a service: sessions, placement, the choice of a replica."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from plait_fabric import Unreachable
from plait_fabric.rpc.replicas import NoReplica, Replica, connect_to_one, in_order, worth_moving
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.controlnet.placement import PlacementTrial
from plait_serving.diffusion.controlnet.sessions import SessionTable
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError
from plait_serving.diffusion.families.unet.controlnet import Constants
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import Conditioning, ControlCall, Residuals
from support.waiting import Clock

CONDITIONING = Conditioning(text=torch.zeros(1, 1, 1), added={}, n=1)
IMAGE = np.zeros((2, 2, 3), dtype=np.uint8)


def _constants(floats: int) -> Constants:
    return Constants(embedding=torch.zeros(1, 1, 1, floats), conditioning=CONDITIONING)


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_least_recently_used_sessions_go_first_and_the_newest_stays() -> None:
    """Over the budget the oldest use goes; one session larger than the budget is still held, until others come."""
    table = SessionTable(capacity_bytes=5_000)
    for number in range(3):
        table.put(0, number, _constants(1))
    table.get(0, 0)
    table.put(0, 3, _constants(500))
    assert [number for number in range(4) if table.get(0, number) is not None] == [0, 3]
    table.put(0, 4, _constants(5_000))
    assert len(table) == 1
    table.put(0, 4, ModelError("small"))
    table.put(0, 5, ModelError("small"))
    assert len(table) == 2


# ---- placement ------------------------------------------------------------------------------------------------------


def test_without_a_service() -> None:
    """AUTO takes what is possible; an explicit placement never falls back."""
    wanted = [Placement.AUTO]
    client = MovableControlNetClient(
        "edges", local=partial(FakeClient, 1.0), remote=None, wanted=lambda: wanted[0], clock=Clock()
    )
    assert client.place() is Placement.LOCAL
    wanted[0] = Placement.REMOTE
    with pytest.raises(ControlNetUnavailable):
        client.place()


class FakeClient:
    """Answers at once, with its own number."""

    name = "edges"

    def __init__(self, number: float) -> None:
        self.answer = Residuals(down=(), mid=torch.full((1, 1, 1, 1), number))
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.stopped = 0
        self.away = False

    def open(self, **_: object) -> object:
        if self.away:
            raise ControlNetUnavailable("nobody")
        self.opened.append(SimpleNamespace(controlnet="edges"))
        return self.opened[-1]

    def start(self, calls: list[ControlCall]) -> Callable[[], list[Residuals]]:
        return lambda: [self.answer] * len(calls)

    def close(self, session: object) -> None:
        self.closed.append(session)

    def shutdown(self) -> None:
        self.stopped += 1


def _call(session: object) -> ControlCall:
    return ControlCall(session=session, sample=torch.zeros(1, 4, 1, 1), timestep=torch.tensor(1), scale=1.0)


def _placed(
    wanted: list[Placement], clock: Clock | None = None
) -> tuple[MovableControlNetClient, FakeClient, FakeClient]:
    local, remote = FakeClient(1.0), FakeClient(2.0)
    client = MovableControlNetClient(
        "edges", local=lambda: local, remote=lambda: remote, wanted=lambda: wanted[0], clock=clock or Clock()
    )
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
    answers = client.start([_call(second), _call(first)])()
    assert [float(answer.mid) for answer in answers if isinstance(answer, Residuals)] == [2.0, 1.0]
    client.close(first)
    assert (local.closed, remote.closed) == (local.opened, [])
    client.shutdown()
    assert remote.stopped == 1


def _request(client: MovableControlNetClient, seconds: list[float], kind: object = "512") -> Placement:
    """A session whose steps take so long; returns where it was."""
    place, session = client.place(), _open(client)
    for each in seconds:
        client.start([_call(session)])()
        client.stepped(kind, each)
    client.close(session)
    return place


SLOW, QUICK = [9.0, 9.0, 2.0, 2.0, 2.0, 2.0], [30.0, 9.0, 1.0, 1.0, 1.0, 1.0]
"""Steps of one place and of the other; the first ones compile."""


@pytest.mark.parametrize(("here", "there", "faster"), [(SLOW, QUICK, Placement.REMOTE), (QUICK, SLOW, Placement.LOCAL)])
def test_a_first_step_that_compiles_never_decides(
    caplog: pytest.LogCaptureFixture, here: list[float], there: list[float], faster: Placement
) -> None:
    """Both places take a user's session; steps of a kind decide, but for the first at each place. It is said why."""
    caplog.set_level(logging.INFO)
    client, local, remote = _placed([Placement.AUTO])
    assert [_request(client, here), _request(client, there)] == [Placement.LOCAL, Placement.REMOTE]
    assert "runs" not in caplog.text
    assert {_request(client, [1.0]) for _ in range(3)} == {faster}
    assert caplog.text.count(f"edges runs {faster.value}: steps took ") == 1
    assert client.times is not None
    assert {client.times.local_s, client.times.remote_s} == {1.0, 2.0}
    assert len(local.opened) + len(remote.opened) == 5


def test_steps_that_do_not_tell_decide_nothing() -> None:
    """Steps that asked both places."""
    client, _, _ = _placed([Placement.AUTO])
    first, second = _open(client), _open(client)
    for _ in range(9):
        client.start([_call(first), _call(second)])()
        client.stepped("512", 1.0)
    assert client.times is None


def test_a_trial_ends_without_steps_that_compare() -> None:
    """Other kinds at each place say nothing; after eight sessions all go where no other process is needed."""
    client, _, _ = _placed([Placement.AUTO])
    places = [_request(client, SLOW, kind=number) for number in range(10)]
    assert places == [Placement.LOCAL, Placement.REMOTE] * 4 + [Placement.LOCAL] * 2


def test_it_is_looked_at_again() -> None:
    """After half an hour, and at once where steps have become half as slow again as when it was decided."""
    clock = Clock()
    client, _, _ = _placed([Placement.AUTO], clock)
    _request(client, SLOW), _request(client, QUICK)
    assert _request(client, QUICK[2:]) is Placement.REMOTE
    clock.now_s += 2000.0
    assert [_request(client, QUICK), _request(client, SLOW)] == [Placement.LOCAL, Placement.REMOTE]
    assert _request(client, [1.4] * 9) is Placement.LOCAL
    assert _request(client, [2.5] * 9) is Placement.LOCAL
    assert [_request(client, SLOW), _request(client, QUICK)] == [Placement.LOCAL, Placement.REMOTE]
    assert _request(client, [1.0]) is Placement.REMOTE


def test_kinds_that_clients_choose_are_bounded() -> None:
    """Of the sizes that are asked for the newest are known."""
    trial = PlacementTrial(Clock())
    for number in range(1000):
        trial.record(Placement.LOCAL, number, 1.0)
    assert len(trial._steps) <= 64


def test_auto_runs_here_while_the_service_that_it_chose_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """New sessions are not refused; they go back to the service when it is there. It is said once each way."""
    caplog.set_level(logging.INFO)
    wanted = [Placement.AUTO]
    client, local, remote = _placed(wanted)
    _request(client, SLOW), _request(client, QUICK)
    opened = len(local.opened), len(remote.opened)
    before = _open(client)
    remote.away = True
    here = [_open(client), _open(client)]
    assert (len(local.opened) - opened[0], len(remote.opened) - opened[1]) == (2, 1)
    assert caplog.text.count("runs here while its service is away") == 1
    remote.away = False
    after = _open(client)
    answers = client.start([_call(session) for session in (before, *here, after)])()
    assert [float(answer.mid) for answer in answers if isinstance(answer, Residuals)] == [2.0, 1.0, 1.0, 2.0]
    assert caplog.text.count("its service is back") == 1
    wanted[0] = Placement.REMOTE
    remote.away = True
    with pytest.raises(ControlNetUnavailable):
        _open(client)


def test_a_service_that_starts_later_is_tried_all_the_same() -> None:
    """Sessions that were to go there run here meanwhile, and no request is refused."""
    client, local, remote = _placed([Placement.AUTO])
    remote.away = True
    for _ in range(4):
        _request(client, SLOW)
    assert (len(local.opened), len(remote.opened)) == (4, 0)
    remote.away = False
    assert _request(client, QUICK) is Placement.LOCAL
    assert _request(client, QUICK) is Placement.REMOTE
    assert len(remote.opened) == 1


# ---- replicas -------------------------------------------------------------------------------------------------------

REPLICAS = [
    Replica(
        name="near", host="me", addresses=("tcp://1.2.3.4:1", "nixl://1.2.3.4:2", "shm:///s"), secret=b"1", channels=1
    ),
    Replica(name="far", host="you", addresses=("shm:///t", "tcp://1.2.3.5:1"), secret=b"2", channels=1),
    Replica(name="idle", host="you", addresses=("tcp://1.2.3.6:1", "nixl://1.2.3.6:2"), secret=b"3", channels=0),
]


def test_replicas_with_fewest_clients_first_then_near_ones() -> None:
    """Load decides, then the machine; of one replica's addresses shared memory is first, on one machine only, then
    one-sided transfers, then TCP."""
    tried = [address for _, address in in_order(REPLICAS, frozenset(), host="me", chance=random.Random(0))]
    near = ["shm:///s", "nixl://1.2.3.4:2", "tcp://1.2.3.4:1"]
    assert tried == ["nixl://1.2.3.6:2", "tcp://1.2.3.6:1", *near, "tcp://1.2.3.5:1"]


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
