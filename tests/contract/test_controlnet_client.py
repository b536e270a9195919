"""Every `ControlNetClient` under one conformance suite, and what only the remote one must survive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel

from plait_fabric import ChannelClosed, Listener, PeerLost, connect, listen, recv_tensors, send_tensors
from plait_fabric.rpc.fields import greeting
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import ReplicaLink
from plait_kernels.heartbeat import Stuck
from plait_serving.diffusion.controlnet.local import LocalControlNetClient
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.controlnet.service import ControlNetService, ServiceLimits
from plait_serving.diffusion.controlnet.wire import VERSION, Call, Open, open_message, step_message
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError, RequestError
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, ControlRows, load_controlnet
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient, Residuals
from support import controlnet as kit
from support.closeness import EQUAL, ulps
from support.waiting import wait_for

_HANGING = """
import sys
sys.path[:0] = {paths!r}
from plait_fabric import listen
from plait_serving.diffusion.controlnet.wire import VERSION
listener = listen(sys.argv[1], secret=bytes.fromhex(sys.stdin.readline()))
print(listener.address, flush=True)
channel = listener.accept()
while True:
    with channel.recv() as message:
        if message.header["op"] == "hello":
            channel.send({{"op": "welcome", "version": VERSION, "controlnet": "edges"}})
        if message.header["op"] == "step":
            print("step", flush=True)
"""
"""A process that greets as a replica does, says "step" on stdout when it is asked one, and never answers it."""


@dataclass(eq=False)
class ForwardGate:
    """A runner's forward passes wait here while it is shut; ``batches`` holds the number of blocks of each."""

    opened: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    batches: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opened.set()


class GatedRunner(ControlNetModelRunner):
    """A runner whose forward passes a test can hold."""

    def __init__(self, model: ControlNetModel, gate: ForwardGate) -> None:
        super().__init__(model)
        self._gate = gate

    def residuals(self, blocks: Sequence[ControlRows]) -> list[Residuals]:
        self._gate.batches.append(len(blocks))
        self._gate.entered.set()
        if not self._gate.opened.wait(60):
            raise TimeoutError("the test never opened the gate")
        return super().residuals(blocks)


WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tiny_sd_controlnets: tuple[Path, Path]) -> Path:
    """A tiny ControlNet for SD 1.x."""
    return tiny_sd_controlnets[0]


@pytest.fixture(scope="module")
def twin(folder: Path) -> torch.nn.Module:
    """diffusers' own model of the same weights."""
    return kit.load_twin(folder)


Twin = Callable[[list[kit.ControlCase]], list[Residuals]]


@pytest.fixture
def expect(twin: torch.nn.Module) -> Twin:
    """What the naive twin answers to asks that share a batch."""
    return lambda asks: kit.twin_answers(twin, asks)


@pytest.fixture
def client(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[ControlNetClient]:
    """The client under test, by the name of the place."""
    with ExitStack() as stack:
        made = _make(request.param, folder, tmp_path, stack)
        yield made
        made.shutdown()


def _make(place: str, folder: Path, tmp_path: Path, stack: ExitStack) -> ControlNetClient:
    runner = load_controlnet(folder, dtype=torch.float32)
    runner.adopt(kit.LooseProgram(runner))
    if place == "local":
        return LocalControlNetClient("edges", runner)
    if place == "placed":
        local = LocalControlNetClient("edges", runner)
        return MovableControlNetClient("edges", local=lambda: local, remote=None, wanted=lambda: Placement.AUTO)
    service = stack.enter_context(kit.serving(runner, kit.new_address(place, tmp_path)))
    return RemoteControlNetClient("edges", kit.ReplicaFleet({"r0": service.addresses[0]}).connect)


EVERYWHERE = pytest.mark.parametrize("client", ["local", "placed", "inproc", "shm", "tcp"], indirect=True)


def _ask(seed: int, **options: object) -> kit.ControlCase:
    return kit.make_ask(seed, width=32, **options)


@EVERYWHERE
class TestConformance:
    """What the denoiser relies on, whatever the place."""

    def test_residuals_are_forward_times_scale_bit_for_bit(self, client: ControlNetClient, expect: Twin) -> None:
        """Mixed sizes, scales and timesteps in one batch, in call order, over several steps."""
        asks = [_ask(1, n=1, scale=0.5, step=981), _ask(2, n=3, scale=1.0, step=21), _ask(3, n=2, scale=-1.5)]
        sessions = [ask.open(client) for ask in asks]
        for order in ([0, 1, 2], [2, 0], [1]):
            pending = client.start([asks[i].call(sessions[i]) for i in order])
            answers = pending.wait()
            wanted = expect([asks[i] for i in order])
            assert all(kit.same_bits(answer, want) for answer, want in zip(answers, wanted, strict=True))
            assert pending.wait() is answers or len(pending.wait()) == len(answers)

    def test_inexact_calls_stay_within_rounding(self, client: ControlNetClient, expect: Twin) -> None:
        """That bits may differ reaches the model, wherever it is: then its prepared program answers."""
        asks = [_ask(1, n=1, scale=0.5, step=981), _ask(2, n=3, scale=1.0, step=21)]
        calls = [replace(ask.call(ask.open(client)), exact=False) for ask in asks]
        differences = [
            kit.ulps(answer, want) for answer, want in zip(client.start(calls).wait(), expect(asks), strict=True)
        ]
        assert 0 < max(differences) <= EQUAL

    def test_session_names_its_controlnet(self, client: ControlNetClient) -> None:
        """Sessions and clients carry the ControlNet's name."""
        assert client.name == "edges"
        assert _ask(1).open(client).controlnet == "edges"

    def test_without_guidance(self, client: ControlNetClient, expect: Twin) -> None:
        """Without CFG a request has n rows, not 2n."""
        ask = _ask(4, n=2, cfg=False)
        answers = client.start([ask.call(ask.open(client))]).wait()
        assert kit.same_bits(answers[0], expect([ask])[0])

    def test_no_calls(self, client: ControlNetClient) -> None:
        """A batch without calls has no answers."""
        assert client.start([]).wait() == []

    def test_two_steps_at_once(self, client: ControlNetClient, expect: Twin) -> None:
        """The same ControlNet twice in a request: both answers stay valid, whichever is awaited first."""
        first, second = _ask(5), _ask(6)
        sessions = first.open(client), second.open(client)
        pending = client.start([first.call(sessions[0])]), client.start([second.call(sessions[1])])
        late, early = pending[1].wait()[0], pending[0].wait()[0]
        assert kit.ulps(early, expect([first])[0]) <= EQUAL
        assert kit.ulps(late, expect([second])[0]) <= EQUAL

    def test_answers_outlive_later_steps(self, client: ControlNetClient, expect: Twin) -> None:
        """Residuals are the caller's: later steps do not change them."""
        first, second = _ask(5), _ask(6)
        kept = client.start([first.call(first.open(client))]).wait()[0]
        session = second.open(client)
        for _ in range(3):
            client.start([second.call(session)]).wait()
        assert kit.same_bits(kept, expect([first])[0])

    def test_closed_and_foreign_sessions_fail_alone(self, client: ControlNetClient, expect: Twin) -> None:
        """A call in a closed or foreign session is its own error; its batch mates are answered."""

        class Foreign:
            controlnet = "colors"

        good, bad = _ask(7), _ask(8)
        session, closed = good.open(client), bad.open(client)
        client.close(closed)
        client.close(closed)
        client.close(Foreign())
        answers = client.start([bad.call(closed), good.call(session), bad.call(Foreign())]).wait()
        assert isinstance(answers[0], ControlNetUnavailable)
        assert isinstance(answers[2], ControlNetUnavailable)
        assert kit.same_bits(answers[1], expect([good])[0])

    def test_nan_stays_in_its_row(self, client: ControlNetClient, expect: Twin) -> None:
        """A request whose latents are NaN gets NaN; the others of its batch get what they always get."""
        sick, well = _ask(9), _ask(10)
        sick.sample.fill_(float("nan"))
        answers = client.start([ask.call(ask.open(client)) for ask in (sick, well)]).wait()
        assert isinstance(answers[0], Residuals)
        assert torch.isnan(answers[0].mid).all()
        assert kit.same_bits(answers[1], expect([sick, well])[1])

    def test_wrong_picture_is_the_callers_mistake(self, client: ControlNetClient) -> None:
        """A control image that is no RGB image is refused at once."""
        with pytest.raises(RequestError):
            client.open(image=np.zeros((4, 4), dtype=np.uint8), conditioning=_ask(1).conditioning, width=32, height=32)

    def test_wrong_family_is_a_model_error(self, client: ControlNetClient) -> None:
        """Text of another width: refused at open, or by the first step of that session alone."""
        ask = kit.make_ask(1, width=48)
        try:
            session = ask.open(client)
        except ModelError:
            return
        assert isinstance(client.start([ask.call(session)]).wait()[0], ModelError)

    def test_many_calls_in_a_step(self, client: ControlNetClient, expect: Twin) -> None:
        """More calls than one message holds come back complete and in order."""
        ask = _ask(11, cfg=False)
        session = ask.open(client)
        calls = [ControlCall(session=session, sample=ask.sample, timestep=ask.timestep, scale=i) for i in range(1, 41)]
        answers = client.start(calls).wait()
        unit = expect([ask])[0].mid
        for i, answer in enumerate(answers, 1):
            assert isinstance(answer, Residuals)
            assert ulps(answer.mid, i * unit) <= EQUAL

    def test_shutdown_twice(self, client: ControlNetClient) -> None:
        """Shutting down again does nothing."""
        client.shutdown()
        client.shutdown()


# ---- the remote client when replicas die ----------------------------------------------------------------------------


class Clock:
    """Time that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def fleet() -> kit.ReplicaFleet:
    """No replica yet."""
    return kit.ReplicaFleet()


def _gated(folder: Path) -> tuple[GatedRunner, ForwardGate]:
    gate = ForwardGate()
    return GatedRunner(load_controlnet(folder, dtype=torch.float32).model, gate), gate


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_kill_nine_in_mid_step_is_retried_elsewhere(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin, scheme: str
) -> None:
    """A process is killed while it owes an answer: another replica gives the answer, and goes on."""
    ask = _ask(1)
    with (
        kit.listening_process(_HANGING, kit.new_address(scheme, tmp_path)) as (process, first),
        kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("tcp", tmp_path)) as second,
    ):
        fleet.addresses |= {"first": first, "second": second.addresses[0]}
        client = RemoteControlNetClient("edges", fleet.connect)
        session = ask.open(client)
        pending = client.start([ask.call(session)])
        assert process.stdout is not None
        assert process.stdout.readline() == "step\n"
        process.kill()
        assert kit.same_bits(pending.wait()[0], expect([ask])[0])
        assert kit.same_bits(client.start([ask.call(session)]).wait()[0], expect([ask])[0])
        assert fleet.asked == [frozenset(), frozenset({"first"})]
        client.shutdown()


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_every_session_moves_to_the_next_replica(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin, scheme: str
) -> None:
    """A replica that goes between two steps: all its sessions are opened again where the next step goes."""
    asks = [_ask(i) for i in range(3)]
    runner = load_controlnet(folder, dtype=torch.float32)
    with (
        kit.serving(runner, kit.new_address(scheme, tmp_path)) as first,
        kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address(scheme, tmp_path)) as second,
    ):
        fleet.addresses |= {"first": first.addresses[0], "second": second.addresses[0]}
        client = RemoteControlNetClient("edges", fleet.connect)
        calls = [ask.call(ask.open(client)) for ask in asks]
        client.start(calls).wait()
        first.stop()
        answers = client.start(calls).wait()
        assert all(kit.same_bits(a, want) for a, want in zip(answers, expect(asks), strict=True))
        assert second.statistics().opened == 3
        client.shutdown()


def test_none_left_fails_those_calls_only_and_a_replica_that_is_back_serves_again(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin
) -> None:
    """No replica: an error for this ControlNet's calls, none for another's; no poison, and no call during the pause."""
    clock, ask, other_fleet = Clock(), _ask(1), kit.ReplicaFleet()
    runner, gate = _gated(folder)
    with ExitStack() as stack:
        only = stack.enter_context(kit.serving(runner, kit.new_address("shm", tmp_path)))
        another = stack.enter_context(
            kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("shm", tmp_path), name="colors")
        )
        fleet.addresses["only"], other_fleet.addresses["x"] = only.addresses[0], another.addresses[0]
        client = RemoteControlNetClient("edges", fleet.connect, backoff=Backoff(first_s=2, max_s=8), clock=clock)
        other = RemoteControlNetClient("colors", other_fleet.connect, clock=clock)
        session, other_session = ask.open(client), ask.open(other)
        gate.opened.clear()
        pending, other_pending = client.start([ask.call(session)]), other.start([ask.call(other_session)])
        assert gate.entered.wait(WAIT_S)
        del fleet.addresses["only"]
        only.stop(drain_s=0)
        gate.opened.set()
        error = pending.wait()[0]
        assert isinstance(error, ControlNetUnavailable)
        assert "edges" in error.message
        assert kit.same_bits(other_pending.wait()[0], expect([ask])[0])
        connects = len(fleet.asked)
        assert isinstance(client.start([ask.call(session)]).wait()[0], ControlNetUnavailable)
        with pytest.raises(ControlNetUnavailable):
            ask.open(client)
        assert len(fleet.asked) == connects
        back = stack.enter_context(
            kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("shm", tmp_path))
        )
        fleet.addresses["back"] = back.addresses[0]
        clock.now_s += 2.0
        assert kit.same_bits(client.start([ask.call(session)]).wait()[0], expect([ask])[0])
        client.shutdown()
        other.shutdown()


def test_lost_channel_to_the_only_replica_is_made_again(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin
) -> None:
    """If only the link broke and the replica lives, it is asked again rather than failing the request."""
    ask = _ask(1)
    links: list[ReplicaLink] = []

    def connect(left_out: frozenset[str]) -> ReplicaLink:
        links.append(fleet.connect(left_out))
        return links[-1]

    with kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("tcp", tmp_path)) as service:
        fleet.addresses["only"] = service.addresses[0]
        client = RemoteControlNetClient("edges", connect)
        session = ask.open(client)
        client.start([ask.call(session)]).wait()
        links[0].channel.close()
        assert kit.same_bits(client.start([ask.call(session)]).wait()[0], expect([ask])[0])
        client.shutdown()


def test_client_moves_to_a_replica_with_fewer_clients(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin
) -> None:
    """Asked now and then: running sessions follow with their next step. If nobody else answers, the client stays."""
    clock, asks, asked = Clock(), [_ask(1), _ask(2), _ask(3)], []

    def worth_moving(replica: str) -> bool:
        asked.append(replica)
        return replica == "old"

    with (
        kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("inproc", tmp_path)) as old,
        kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("inproc", tmp_path)) as new,
    ):
        fleet.addresses["old"] = old.addresses[0]
        client = RemoteControlNetClient("edges", fleet.connect, worth_moving=worth_moving, clock=clock)
        sessions = [asks[0].open(client)]
        clock.now_s += 60
        sessions.append(asks[1].open(client))  # nobody else is there
        fleet.addresses["new"] = new.addresses[0]
        asks[0].open(client)  # too early to ask again
        assert asked == ["old"]
        clock.now_s += 60
        sessions.append(asks[2].open(client))
        answers = client.start([ask.call(session) for ask, session in zip(asks, sessions, strict=True)]).wait()
        assert all(kit.same_bits(a, want) for a, want in zip(answers, expect(asks), strict=True))
        assert (new.statistics().steps, old.statistics().steps, asked) == (1, 0, ["old", "old"])
        wait_for(lambda: old.statistics().sessions == 0)
        client.shutdown()


def test_hung_replica_counts_as_lost(folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin) -> None:
    """No answer in time: another replica is asked; the hung one is not asked again for this step."""
    ask = _ask(1)
    runner, gate = _gated(folder)
    gate.opened.clear()
    with (
        kit.serving(runner, kit.new_address("inproc", tmp_path)) as hung,
        kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("inproc", tmp_path)) as well,
    ):
        fleet.addresses |= {"hung": hung.addresses[0], "well": well.addresses[0]}
        client = RemoteControlNetClient("edges", fleet.connect, answer_timeout_s=3.0)
        pending = client.start([ask.call(ask.open(client))])
        assert kit.same_bits(pending.wait()[0], expect([ask])[0])
        assert fleet.asked[-1] == frozenset({"hung"})
        gate.opened.set()
        client.shutdown()


def test_step_that_kills_every_replica_is_given_up(fleet: kit.ReplicaFleet, tmp_path: Path) -> None:
    """A step is tried on three replicas, not on all: whatever kills them must not kill the whole fleet."""

    with ExitStack() as stack:
        for number in range(5):
            listener = listen(kit.new_address("inproc", tmp_path), secret=kit.SECRET)
            stack.enter_context(listener)
            threading.Thread(target=_dies_in_its_first_step, args=(listener,), daemon=True).start()
            fleet.addresses[f"r{number}"] = listener.address
        client = RemoteControlNetClient("edges", fleet.connect)
        ask = _ask(1)
        answer = client.start([ask.call(ask.open(client))]).wait()[0]
        assert isinstance(answer, ControlNetUnavailable)
        assert sorted(fleet.asked[-1]) == ["r0", "r1"]


def _dies_in_its_first_step(listener: Listener) -> None:
    with suppress(ChannelClosed), listener.accept(WAIT_S) as channel:
        for message in iter(lambda: recv_tensors(channel, WAIT_S), None):
            with message:
                if message.header["op"] == "hello":
                    send_tensors(channel, {"op": "welcome", "version": VERSION, "controlnet": "edges"}, {})
                if message.header["op"] == "step":
                    return


@pytest.mark.parametrize("reply", ["twice", "unasked", "short", "garbage"])
def test_replica_that_mixes_up_answers_is_left(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin, reply: str
) -> None:
    """An answer twice, to nothing that was asked, of wrong length or of no sense: another replica answers instead."""
    ask = _ask(1)
    runner = load_controlnet(folder, dtype=torch.float32)
    with (
        listen(kit.new_address("inproc", tmp_path), secret=kit.SECRET) as listener,
        kit.serving(runner, kit.new_address("inproc", tmp_path)) as well,
    ):
        threading.Thread(target=_answers_wrongly, args=(listener, reply), daemon=True).start()
        fleet.addresses |= {"confused": listener.address, "well": well.addresses[0]}
        client = RemoteControlNetClient("edges", fleet.connect)
        session = ask.open(client)
        for _ in range(2):
            answer = client.start([ask.call(session)]).wait()[0]
            if isinstance(answer, Residuals):
                assert kit.same_bits(answer, expect([ask])[0])
            else:
                assert reply == "twice"
        assert fleet.asked[-1] == frozenset({"confused"})
        client.shutdown()


def _answers_wrongly(listener: Listener, reply: str) -> None:
    error = ["invalid_model", "it is confused"]
    headers = {
        "twice": {"op": "residuals", "seq": 0, "errors": [error]},
        "unasked": {"op": "residuals", "seq": 7, "errors": [error]},
        "short": {"op": "residuals", "seq": 0, "errors": [error, error]},
        "garbage": {"op": "residuals", "seq": "0", "errors": 1},
    }
    with suppress(PeerLost), listener.accept(WAIT_S) as channel:
        for message in iter(lambda: recv_tensors(channel, WAIT_S), None):
            with message:
                if message.header["op"] == "hello":
                    send_tensors(channel, {"op": "welcome", "version": VERSION, "controlnet": "edges"}, {})
                if message.header["op"] == "step":
                    send_tensors(channel, headers[reply], {})


def test_replica_of_another_controlnet_is_not_used(folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet) -> None:
    """An address that now belongs to another ControlNet is refused at the greeting."""
    with kit.serving(
        load_controlnet(folder, dtype=torch.float32), kit.new_address("shm", tmp_path), name="colors"
    ) as it:
        fleet.addresses["stale"] = it.addresses[0]
        client = RemoteControlNetClient("edges", fleet.connect)
        with pytest.raises(ControlNetUnavailable):
            _ask(1).open(client)


# ---- the service ----------------------------------------------------------------------------------------------------


def _waiting(service: ControlNetService) -> int:
    return len(service._inbox.items)


def test_base_replicas_share_forward_passes(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin
) -> None:
    """Steps of two base replicas that wait at the same time are computed together, and each gets its own answer."""
    runner, gate = _gated(folder)
    with kit.serving(runner, kit.new_address("shm", tmp_path)) as service:
        fleet.addresses["r"] = service.addresses[0]
        clients = [RemoteControlNetClient("edges", fleet.connect) for _ in range(4)]
        asks = [_ask(1), _ask(2, n=2), _ask(3, step=7), _ask(4, cfg=False)]
        sessions = [ask.open(client) for ask, client in zip(asks, clients, strict=True)]
        wait_for(lambda: service.statistics().opened == len(asks))
        gate.opened.clear()
        pendings = [clients[0].start([asks[0].call(sessions[0])])]
        assert gate.entered.wait(WAIT_S)
        pendings += [c.start([a.call(s)]) for c, a, s in list(zip(clients, asks, sessions, strict=True))[1:]]
        wait_for(lambda: _waiting(service) == 3)
        gate.opened.set()
        answers = [pending.wait()[0] for pending in pendings]
        for answer, ask in zip(answers, asks, strict=True):
            assert kit.ulps(answer, expect([ask])[0]) <= EQUAL
        assert gate.batches == [1, 3]
        statistics = service.statistics()
        assert (statistics.batches, statistics.shared_batches, statistics.steps, statistics.rows) == (2, 1, 4, 9)
        assert (statistics.channels, statistics.sessions, statistics.failed_calls) == (4, 4, 0)
        for client in clients:
            client.shutdown()
        wait_for(lambda: service.statistics().channels == 0 and service.statistics().sessions == 0)


def test_batches_are_bounded(folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet) -> None:
    """More rows than a batch may have wait for the next; the oldest go first."""
    runner, gate = _gated(folder)
    address = kit.new_address("inproc", tmp_path)
    with kit.serving(runner, address, limits=ServiceLimits(largest_batch_rows=5)) as service:
        fleet.addresses["r"] = service.addresses[0]
        client, ask = RemoteControlNetClient("edges", fleet.connect), _ask(1)
        session = ask.open(client)
        gate.opened.clear()
        pendings = [client.start([ask.call(session)])]
        assert gate.entered.wait(WAIT_S)
        pendings += [client.start([ask.call(session)]) for _ in range(5)]
        wait_for(lambda: _waiting(service) == 5)
        gate.opened.set()
        for pending in pendings:
            assert isinstance(pending.wait()[0], Residuals)
        assert gate.batches == [1, 2, 2, 1]
        service.reconfigure(threads=1, largest_batch_rows=64)
        assert isinstance(client.start([ask.call(session)]).wait()[0], Residuals)
        client.shutdown()


def test_sessions_that_were_pushed_out_are_opened_again(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin
) -> None:
    """The service forgets the least recently used sessions when memory is short; the client never notices."""
    address = kit.new_address("inproc", tmp_path)
    limits = ServiceLimits(sessions_bytes=60_000)
    with kit.serving(load_controlnet(folder, dtype=torch.float32), address, limits=limits) as service:
        fleet.addresses["r"] = service.addresses[0]
        client, asks = RemoteControlNetClient("edges", fleet.connect), [_ask(i) for i in range(4)]
        sessions = [ask.open(client) for ask in asks]
        for i in (0, 1, 2, 3, 0):
            answer = client.start([asks[i].call(sessions[i])]).wait()[0]
            assert kit.same_bits(answer, expect([asks[i]])[0])
        assert service.statistics().sessions < 4
        assert service.statistics().opened > 4
        client.shutdown()


def test_more_sessions_in_a_step_than_fit_is_an_error_not_a_loop(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet
) -> None:
    """If one step's sessions do not fit together, the calls that lost theirs fail after one more try."""
    address = kit.new_address("inproc", tmp_path)
    with kit.serving(
        load_controlnet(folder, dtype=torch.float32), address, limits=ServiceLimits(sessions_bytes=1)
    ) as it:
        fleet.addresses["r"] = it.addresses[0]
        client, asks = RemoteControlNetClient("edges", fleet.connect), [_ask(i) for i in range(3)]
        answers = client.start([ask.call(ask.open(client)) for ask in asks]).wait()
        assert isinstance(answers[2], Residuals)
        assert sum(isinstance(answer, ControlNetUnavailable) for answer in answers) == 1
        client.shutdown()


def test_stop_answers_what_has_arrived(folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet, expect: Twin) -> None:
    """A graceful stop answers the steps that were asked before it, then hangs up; the next step finds nobody."""
    runner, gate = _gated(folder)
    with kit.serving(runner, kit.new_address("tcp", tmp_path)) as service:
        fleet.addresses["r"] = service.addresses[0]
        client, ask = RemoteControlNetClient("edges", fleet.connect), _ask(1)
        session = ask.open(client)
        gate.opened.clear()
        pending = client.start([ask.call(session)])
        assert gate.entered.wait(WAIT_S)
        stopper = threading.Thread(target=service.stop, kwargs={"drain_s": 30})
        stopper.start()
        gate.opened.set()
        assert kit.same_bits(pending.wait()[0], expect([ask])[0])
        stopper.join(WAIT_S)
        assert not service.alive
        assert isinstance(client.start([ask.call(session)]).wait()[0], ControlNetUnavailable)
        client.shutdown()


def test_a_forward_pass_that_hangs_is_noticed(folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet) -> None:
    """The thread lives and answers nobody; a service that waits for steps, or is quick, is fine (finding 9)."""
    runner, gate = _gated(folder)
    ahead = [0.0]

    def checks_pass(service: ControlNetService, seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            ahead[0] += 5.0
            service.check_progress()

    with kit.serving(runner, kit.new_address("shm", tmp_path), clock=lambda: time.monotonic() + ahead[0]) as service:
        fleet.addresses["r"] = service.addresses[0]
        client, ask = RemoteControlNetClient("edges", fleet.connect), _ask(1)
        session = ask.open(client)
        assert client.start([ask.call(session)]).wait()
        gate.entered.clear()
        gate.opened.clear()
        pending = client.start([ask.call(session)])
        try:
            assert gate.entered.wait(WAIT_S)
            checks_pass(service, 60)
            with pytest.raises(Stuck, match=r"a batch of .* rows has not ended"):
                checks_pass(service, 60)
        finally:
            gate.opened.set()
        assert isinstance(pending.wait()[0], Residuals)
        client.shutdown()


@pytest.mark.parametrize(
    "header",
    [
        {"op": "hello", "version": 99},
        {"op": "step", "seq": 0, "calls": [[0, 1.0, 1.0]]},
        {"op": "surprise"},
    ],
)
def test_client_that_breaks_the_protocol_is_hung_up_on(folder: Path, tmp_path: Path, header: dict[str, object]) -> None:
    """Whoever does not begin with hello of our version loses its channel; the service goes on."""
    with kit.serving(load_controlnet(folder, dtype=torch.float32), kit.new_address("shm", tmp_path)) as service:
        channel = connect(service.addresses[0], secret=kit.SECRET)
        send_tensors(channel, header, {})
        with pytest.raises(PeerLost):
            channel.recv(WAIT_S)
        assert service.alive


def test_client_that_reads_nothing_is_dropped_and_others_are_served(
    folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet
) -> None:
    """Answers that nobody takes do not pile up and hold up nobody: that client's channel is cut."""
    address = kit.new_address("shm", tmp_path)
    runner = load_controlnet(folder, dtype=torch.float32)
    with kit.serving(runner, address, limits=ServiceLimits(send_timeout_s=0.5)) as service:
        deaf = connect(service.addresses[0], secret=kit.SECRET)
        ask = _ask(1)
        send_tensors(deaf, greeting("hello", VERSION, {}), {})
        request = Open(session=0, image=ask.image, conditioning=ask.conditioning, width=32, height=32)
        send_tensors(deaf, *open_message(request))
        call = Call(session=0, sample=ask.sample, timestep=1.0, scale=1.0)
        fleet.addresses["r"] = service.addresses[0]
        client = RemoteControlNetClient("edges", fleet.connect)
        session = ask.open(client)
        with pytest.raises(PeerLost):
            for seq in range(1000):
                send_tensors(deaf, *step_message(seq, (call,)), timeout_s=WAIT_S)
        assert isinstance(client.start([ask.call(session)]).wait()[0], Residuals)
        assert service.statistics().steps < 1000
        client.shutdown()


def test_channels_are_bounded(folder: Path, tmp_path: Path, fleet: kit.ReplicaFleet) -> None:
    """One client more than allowed is refused; the others are served."""
    address = kit.new_address("shm", tmp_path)
    with kit.serving(
        load_controlnet(folder, dtype=torch.float32), address, limits=ServiceLimits(channels=1)
    ) as service:
        fleet.addresses["r"] = service.addresses[0]
        first, second = (RemoteControlNetClient("edges", fleet.connect) for _ in range(2))
        ask = _ask(1)
        session = ask.open(first)
        with pytest.raises(ControlNetUnavailable):
            ask.open(second)
        assert isinstance(first.start([ask.call(session)]).wait()[0], Residuals)
        assert service.statistics().refused_channels >= 1
        first.shutdown()
