"""Every `ControlNetClient` under one conformance suite, and what only the remote one must survive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel

from plait_fabric import ChannelClosed, Listener, PeerLost, connect, listen, recv_tensors, send_tensors
from plait_fabric.rpc.fields import greeting
from plait_fabric.rpc.outages import Backoff
from plait_kernels.heartbeat import Stuck
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.controlnet.service import ControlNetService, ServiceLimits
from plait_serving.diffusion.controlnet.wire import VERSION, Open, open_message, step_message
from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError, ModelError, RequestError
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import (
    Answers,
    ControlCall,
    ControlNetClient,
    ControlSession,
    Residuals,
)
from support import controlnet as kit
from support.closeness import EQUAL, ulps
from support.fabric import Replicas, new_address
from support.waiting import Clock, wait_for

WAIT_S = 60.0


class GatedRunner(ControlNetModelRunner):
    """A runner whose forward passes wait while it is shut; ``batches`` holds the number of blocks of each."""

    def __init__(self, model: ControlNetModel) -> None:
        super().__init__(model)
        self.opened, self.entered = threading.Event(), threading.Event()
        self.opened.set()
        self.batches: list[int] = []

    def residuals(self, blocks: Sequence[ControlCall]) -> list[Residuals]:
        self.batches.append(len(blocks))
        self.entered.set()
        if not self.opened.wait(WAIT_S):
            raise TimeoutError("the test never opened the gate")
        return super().residuals(blocks)


class Fleet(Replicas):
    """Replicas of a tiny ControlNet for SD 1.x in threads, and clients that connect to them. All end with the test."""

    def __init__(self, folder: Path, places: Path, stack: ExitStack) -> None:
        super().__init__(secret=kit.SECRET, timeout_s=60)
        self._folder, self._places, self._stack = folder, places, stack

    def runner(self) -> ControlNetModelRunner:
        return load_controlnet(self._folder, name="edges", dtype=torch.float32)

    def gated(self) -> GatedRunner:
        return GatedRunner(self.runner().model)

    def serve(
        self, replica: str = "r", scheme: str = "inproc", runner: ControlNetModelRunner | None = None, **options: Any
    ) -> ControlNetService:
        """One more; options as for `support.controlnet.serving`."""
        address = new_address(scheme, self._places)
        service = self._stack.enter_context(kit.serving(runner or self.runner(), address, **options))
        self.addresses[replica] = service.addresses[0]
        return service

    def client(self, **options: Any) -> RemoteControlNetClient:
        client = RemoteControlNetClient("edges", self.connect, **options)
        self._stack.callback(client.shutdown)
        return client


@pytest.fixture
def fleet(tiny_sd_controlnets: tuple[Path, Path], tmp_path: Path) -> Iterator[Fleet]:
    """No replica yet."""
    with ExitStack() as stack:
        yield Fleet(tiny_sd_controlnets[0], tmp_path, stack)


class Twin:
    """What diffusers' own model of the same weights answers to asks that share a batch."""

    def __init__(self, folder: Path) -> None:
        self._model = kit.load_twin(folder)

    def __call__(self, *asks: kit.ControlCase) -> list[Residuals]:
        return kit.twin_answers(self._model, asks)

    def is_exact(self, answers: list[Residuals | EngineError], *asks: kit.ControlCase) -> bool:
        """Whether these are the answers, bit for bit."""
        return all(kit.same_bits(answer, want) for answer, want in zip(answers, self(*asks), strict=True))

    def ulps(self, answers: list[Residuals | EngineError], *asks: kit.ControlCase) -> float:
        """The largest difference from the answers to each ask alone."""
        return max(kit.ulps(answer, self(ask)[0]) for answer, ask in zip(answers, asks, strict=True))


@pytest.fixture(scope="module")
def twin(tiny_sd_controlnets: tuple[Path, Path]) -> Twin:
    return Twin(tiny_sd_controlnets[0])


@pytest.fixture
def client(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[ControlNetClient]:
    """The client under test, by the name of the place; shutting it down again does nothing."""
    runner = fleet.runner()
    runner.adopt(kit.LooseProgram(runner))
    made: ControlNetClient = runner
    if request.param == "placed":
        local = made
        made = MovableControlNetClient("edges", local=lambda: local, remote=None, wanted=lambda: Placement.AUTO)
    elif request.param != "local":
        fleet.serve(scheme=request.param, runner=runner)
        made = fleet.client()
    yield made
    made.shutdown()
    made.shutdown()


_ask = kit.make_ask
EVERYWHERE = pytest.mark.parametrize("client", ["local", "placed", "shm"], indirect=True)


def _answers(client: ControlNetClient, ask: kit.ControlCase, session: ControlSession) -> list[Residuals | EngineError]:
    return client.start([ask.call(session)])()


def _held(gate: GatedRunner, client: ControlNetClient, call: ControlCall) -> Answers:
    """A step whose forward pass has begun, and ends when the gate is opened."""
    gate.entered.clear()
    gate.opened.clear()
    pending = client.start([call])
    assert gate.entered.wait(WAIT_S)
    return pending


@EVERYWHERE
class TestConformance:
    """What the denoiser relies on, whatever the place."""

    def test_residuals_are_forward_times_scale_bit_for_bit(self, client: ControlNetClient, twin: Twin) -> None:
        """Mixed sizes, scales and timesteps in one batch, with guidance and without, in call order, over several
        steps."""
        asks = [_ask(1, scale=0.5, step=981), _ask(2, n=3, step=21), _ask(3, n=2, cfg=False, scale=-1.5)]
        sessions = [ask.open(client) for ask in asks]
        for order in ([0, 1, 2], [2, 0], [1]):
            pending = client.start([asks[i].call(sessions[i]) for i in order])
            assert twin.is_exact(pending(), *(asks[i] for i in order))
        assert client.start([])() == []

    def test_inexact_calls_stay_within_rounding(self, client: ControlNetClient, twin: Twin) -> None:
        """That bits may differ reaches the model, wherever it is: then its prepared program answers."""
        asks = [_ask(1, scale=0.5, step=981), _ask(2, n=3, step=21)]
        calls = [replace(ask.call(ask.open(client)), exact=False) for ask in asks]
        assert 0 < twin.ulps(client.start(calls)(), *asks) <= EQUAL

    def test_answers_are_the_callers(self, client: ControlNetClient, twin: Twin) -> None:
        """The same ControlNet twice in a request, whichever is awaited first; later steps change no answer."""
        asks = _ask(5), _ask(6)
        calls = [ask.call(ask.open(client)) for ask in asks]
        first, second = client.start(calls[:1]), client.start(calls[1:])
        late, early = second()[0], first()[0]
        for _ in range(3):
            client.start(calls[1:])()
        assert twin.ulps([early, late], *asks) <= EQUAL

    def test_a_closed_session_leaves_the_others(self, client: ControlNetClient, twin: Twin) -> None:
        """Also one that is closed twice."""
        good, gone = _ask(7), _ask(8)
        session, closed = good.open(client), gone.open(client)
        assert client.name == "edges"
        client.close(closed)
        client.close(closed)
        assert twin.is_exact(_answers(client, good, session), good)

    def test_nan_stays_in_its_row(self, client: ControlNetClient, twin: Twin) -> None:
        """A request whose latents are NaN gets NaN; the others of its batch get what they always get."""
        sick, well = _ask(9), _ask(10)
        sick.sample.fill_(float("nan"))
        answers = client.start([ask.call(ask.open(client)) for ask in (sick, well)])()
        assert isinstance(answers[0], Residuals)
        assert torch.isnan(answers[0].mid).all()
        assert kit.same_bits(answers[1], twin(sick, well)[1])

    def test_what_is_wrong_is_told(self, client: ControlNetClient) -> None:
        """A control image that is no RGB image is refused at once; text of another family's width at open, or by the
        first step of that session alone."""
        ask = _ask(1, width=48)
        with pytest.raises(RequestError):
            client.open(image=np.zeros((4, 4), dtype=np.uint8), conditioning=_ask(1).conditioning, width=32, height=32)
        try:
            session = ask.open(client)
        except ModelError:
            return
        assert isinstance(_answers(client, ask, session)[0], ModelError)

    def test_many_calls_in_a_step(self, client: ControlNetClient, twin: Twin) -> None:
        """More calls than one message holds come back complete and in order."""
        ask = _ask(11, cfg=False)
        session = ask.open(client)
        calls = [ControlCall(session=session, sample=ask.sample, timestep=ask.timestep, scale=i) for i in range(1, 41)]
        answers = client.start(calls)()
        unit = twin(ask)[0].mid
        for i, answer in enumerate(answers, 1):
            assert isinstance(answer, Residuals)
            assert ulps(answer.mid, i * unit) <= EQUAL


# ---- the remote client when replicas die ----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_every_session_moves_to_the_next_replica(fleet: Fleet, twin: Twin, scheme: str) -> None:
    """A replica that goes between two steps: all its sessions are opened again where the next step goes."""
    asks = [_ask(i) for i in range(3)]
    first, second = fleet.serve("first", scheme), fleet.serve("second", scheme)
    client = fleet.client()
    calls = [ask.call(ask.open(client)) for ask in asks]
    client.start(calls)()
    first.stop()
    assert twin.is_exact(client.start(calls)(), *asks)
    assert second.statistics().opened == 3


def test_none_left_is_an_error_and_a_replica_that_is_back_serves_again(fleet: Fleet, twin: Twin) -> None:
    """No replica is asked during the pause after that, and nothing of it stays."""
    clock, ask, gate = Clock(), _ask(1), fleet.gated()
    only = fleet.serve("only", "shm", runner=gate)
    client = fleet.client(backoff=Backoff(first_s=2, max_s=8), clock=clock)
    session = ask.open(client)
    pending = _held(gate, client, ask.call(session))
    del fleet.addresses["only"]
    only.stop(drain_s=0)
    gate.opened.set()
    error = pending()[0]
    assert isinstance(error, ControlNetUnavailable)
    assert "edges" in error.message
    connects = len(fleet.asked)
    assert isinstance(_answers(client, ask, session)[0], ControlNetUnavailable)
    with pytest.raises(ControlNetUnavailable):
        ask.open(client)
    assert len(fleet.asked) == connects
    fleet.serve("back", "shm")
    clock.now_s += 2.0
    assert twin.is_exact(_answers(client, ask, session), ask)


def test_lost_channel_to_the_only_replica_is_made_again(fleet: Fleet, twin: Twin) -> None:
    """If only the link broke and the replica lives, it is asked again rather than failing the request."""
    fleet.serve("only", "tcp")
    client, ask = fleet.client(), _ask(1)
    session = ask.open(client)
    _answers(client, ask, session)
    fleet.links[0].channel.close()
    assert twin.is_exact(_answers(client, ask, session), ask)


def test_client_moves_to_a_replica_with_fewer_clients(fleet: Fleet, twin: Twin) -> None:
    """Asked now and then: running sessions follow with their next step. If nobody else answers, the client stays."""
    clock, asks, asked = Clock(), [_ask(1), _ask(2), _ask(3)], []

    def worth_moving(replica: str) -> bool:
        asked.append(replica)
        return replica == "old"

    old = fleet.serve("old")
    client = fleet.client(worth_moving=worth_moving, clock=clock)
    sessions = [asks[0].open(client)]
    clock.now_s += 60
    sessions.append(asks[1].open(client))  # nobody else is there
    new = fleet.serve("new")
    asks[0].open(client)  # too early to ask again
    assert asked == ["old"]
    clock.now_s += 60
    sessions.append(asks[2].open(client))
    answers = client.start([ask.call(session) for ask, session in zip(asks, sessions, strict=True)])()
    assert twin.is_exact(answers, *asks)
    assert (new.statistics().steps, old.statistics().steps, asked) == (1, 0, ["old", "old"])
    wait_for(lambda: old.statistics().sessions == 0)


def test_hung_replica_counts_as_lost(fleet: Fleet, twin: Twin) -> None:
    """No answer in time: another replica is asked; the hung one is not asked again for this step."""
    ask, gate = _ask(1), fleet.gated()
    gate.opened.clear()
    fleet.serve("hung", runner=gate)
    fleet.serve("well")
    client = fleet.client(answer_timeout_s=1.0)
    assert twin.is_exact(_answers(client, ask, ask.open(client)), ask)
    assert fleet.asked[-1] == frozenset({"hung"})
    gate.opened.set()


def _pretend(listener: Listener, reply: dict[str, object] | None) -> None:
    """A replica that answers a step with that header, or with None goes away."""
    with suppress(ChannelClosed, PeerLost), listener.accept(WAIT_S) as channel:
        for message in iter(lambda: recv_tensors(channel, WAIT_S), None):
            with message:
                if message.header["op"] == "hello":
                    send_tensors(channel, {"op": "welcome", "version": VERSION, "controlnet": "edges"}, {})
                if message.header["op"] == "step":
                    if reply is None:
                        return
                    send_tensors(channel, reply, {})


def test_step_that_kills_every_replica_is_given_up(fleet: Fleet, tmp_path: Path) -> None:
    """A step is tried on three replicas, not on all: whatever kills them must not kill the whole fleet."""
    with ExitStack() as stack:
        for number in range(5):
            listener = stack.enter_context(listen(new_address("inproc", tmp_path), secret=kit.SECRET))
            threading.Thread(target=_pretend, args=(listener, None), daemon=True).start()
            fleet.addresses[f"r{number}"] = listener.address
        client, ask = fleet.client(), _ask(1)
        assert isinstance(_answers(client, ask, ask.open(client))[0], ControlNetUnavailable)
        assert sorted(fleet.asked[-1]) == ["r0", "r1"]


_CONFUSED = ["invalid_model", "it is confused"]
REPLIES = {
    "twice": {"op": "residuals", "seq": 0, "errors": [_CONFUSED]},
    "unasked": {"op": "residuals", "seq": 7, "errors": [_CONFUSED]},
    "too long": {"op": "residuals", "seq": 0, "errors": [_CONFUSED, _CONFUSED]},
    "garbage": {"op": "residuals", "seq": "0", "errors": 1},
}


@pytest.mark.parametrize("reply", REPLIES)
def test_replica_that_mixes_up_answers_is_left(fleet: Fleet, tmp_path: Path, twin: Twin, reply: str) -> None:
    """An answer twice, to nothing that was asked, of wrong length or of no sense: another replica answers instead."""
    ask = _ask(1)
    with listen(new_address("inproc", tmp_path), secret=kit.SECRET) as listener:
        threading.Thread(target=_pretend, args=(listener, REPLIES[reply]), daemon=True).start()
        fleet.addresses["confused"] = listener.address
        fleet.serve("well")
        client = fleet.client()
        session = ask.open(client)
        first, second = _answers(client, ask, session), _answers(client, ask, session)
        assert isinstance(first[0], ModelError) if reply == "twice" else twin.is_exact(first, ask)
        assert twin.is_exact(second, ask)
        assert fleet.asked[-1] == frozenset({"confused"})


def test_replica_of_another_controlnet_is_not_used(fleet: Fleet) -> None:
    """An address that now belongs to another ControlNet is refused at the greeting."""
    fleet.serve(name="colors")
    with pytest.raises(ControlNetUnavailable):
        _ask(1).open(fleet.client())


# ---- the service ----------------------------------------------------------------------------------------------------


def _waiting(service: ControlNetService) -> int:
    return service._inbox.qsize()


def test_base_replicas_share_forward_passes(fleet: Fleet, twin: Twin) -> None:
    """Steps of several base replicas that wait at the same time are computed together, and each gets its own answer."""
    gate = fleet.gated()
    service = fleet.serve(scheme="shm", runner=gate)
    clients = [fleet.client() for _ in range(4)]
    asks = [_ask(1), _ask(2, n=2), _ask(3, step=7), _ask(4, cfg=False)]
    calls = [ask.call(ask.open(client)) for ask, client in zip(asks, clients, strict=True)]
    wait_for(lambda: service.statistics().opened == len(asks))
    pendings = [_held(gate, clients[0], calls[0])]
    pendings += [client.start([call]) for client, call in zip(clients[1:], calls[1:], strict=True)]
    wait_for(lambda: _waiting(service) == 3)
    gate.opened.set()
    assert twin.ulps([pending()[0] for pending in pendings], *asks) <= EQUAL
    assert gate.batches == [1, 3]
    statistics = service.statistics()
    assert (statistics.steps, statistics.channels, statistics.sessions) == (4, 4, 4)
    clients[0].shutdown()  # whose sessions have the numbers of the others'
    wait_for(lambda: (service.statistics().channels, service.statistics().sessions) == (3, 3))
    for client in clients:
        client.shutdown()
    wait_for(lambda: service.statistics().channels == 0 and service.statistics().sessions == 0)


def test_batches_are_bounded(fleet: Fleet) -> None:
    """More rows than a batch may have wait for the next; the oldest go first."""
    gate = fleet.gated()
    service = fleet.serve(runner=gate, limits=ServiceLimits(largest_batch_rows=5))
    client, ask = fleet.client(), _ask(1)
    session = ask.open(client)
    pendings = [_held(gate, client, ask.call(session))]
    pendings += [client.start([ask.call(session)]) for _ in range(5)]
    wait_for(lambda: _waiting(service) == 5)
    gate.opened.set()
    for pending in pendings:
        assert isinstance(pending()[0], Residuals)
    assert gate.batches == [1, 2, 2, 1]
    service.reconfigure(threads=1, largest_batch_rows=64)
    assert isinstance(_answers(client, ask, session)[0], Residuals)


def test_sessions_that_were_pushed_out_are_opened_again(fleet: Fleet, twin: Twin) -> None:
    """The service forgets the least recently used sessions when memory is short; the client never notices."""
    service = fleet.serve(limits=ServiceLimits(sessions_bytes=60_000))
    client, asks = fleet.client(), [_ask(i) for i in range(4)]
    sessions = [ask.open(client) for ask in asks]
    for i in (0, 1, 2, 3, 0):
        assert twin.is_exact(_answers(client, asks[i], sessions[i]), asks[i])
    assert service.statistics().sessions < 4
    assert service.statistics().opened > 4


def test_more_sessions_in_a_step_than_fit_is_an_error_not_a_loop(fleet: Fleet) -> None:
    """If one step's sessions do not fit together, the calls that lost theirs fail after one more try."""
    fleet.serve(limits=ServiceLimits(sessions_bytes=1))
    client = fleet.client()
    answers = client.start([ask.call(ask.open(client)) for ask in (_ask(0), _ask(1), _ask(2))])()
    assert isinstance(answers[2], Residuals)
    assert sum(isinstance(answer, ControlNetUnavailable) for answer in answers) == 1


def test_stop_answers_what_has_arrived(fleet: Fleet, twin: Twin) -> None:
    """A graceful stop answers the steps that were asked before it, then hangs up; the next step finds nobody."""
    gate, ask = fleet.gated(), _ask(1)
    service, client = fleet.serve(scheme="tcp", runner=gate), fleet.client()
    session = ask.open(client)
    pending = _held(gate, client, ask.call(session))
    stopper = threading.Thread(target=service.stop, kwargs={"drain_s": 30})
    stopper.start()
    gate.opened.set()
    assert twin.is_exact(pending(), ask)
    stopper.join(WAIT_S)
    assert not service.alive
    assert isinstance(_answers(client, ask, session)[0], ControlNetUnavailable)


def test_a_forward_pass_that_hangs_is_noticed(fleet: Fleet) -> None:
    """The thread lives and answers nobody; a service that waits for steps, or is quick, is fine (finding 9)."""
    gate, ask, ahead = fleet.gated(), _ask(1), [0.0]
    service = fleet.serve(scheme="shm", runner=gate, clock=lambda: time.monotonic() + ahead[0])

    def checks_pass(seconds: float) -> None:
        for _ in range(round(seconds / 5)):
            ahead[0] += 5.0
            service.check_progress()

    client = fleet.client()
    session = ask.open(client)
    _answers(client, ask, session)
    pending = _held(gate, client, ask.call(session))
    try:
        checks_pass(60)
        with pytest.raises(Stuck, match=r"a batch of .* rows has not ended"):
            checks_pass(60)
    finally:
        gate.opened.set()
    assert isinstance(pending()[0], Residuals)


def test_client_that_reads_nothing_is_dropped_and_others_are_served(fleet: Fleet) -> None:
    """Answers that nobody takes do not pile up and hold up nobody: that client's channel is cut."""
    service, ask = fleet.serve(scheme="shm", limits=ServiceLimits(send_timeout_s=0.5)), _ask(1)
    deaf = connect(service.addresses[0], secret=kit.SECRET)
    send_tensors(deaf, greeting("hello", VERSION, {}), {})
    request = Open(session=0, image=ask.image, conditioning=ask.conditioning, width=32, height=32)
    send_tensors(deaf, *open_message(request))
    call = ControlCall(session=0, sample=ask.sample, timestep=ask.timestep, scale=1.0)
    client = fleet.client()
    session = ask.open(client)
    with pytest.raises(PeerLost):
        for seq in range(1000):
            send_tensors(deaf, *step_message(seq, [call]), timeout_s=WAIT_S)
    assert isinstance(_answers(client, ask, session)[0], Residuals)
    assert service.statistics().steps < 1000


def test_channels_are_bounded(fleet: Fleet) -> None:
    """One client more than allowed is refused; the others are served."""
    fleet.serve(scheme="shm", limits=ServiceLimits(channels=1))
    first, ask = fleet.client(), _ask(1)
    session = ask.open(first)
    with pytest.raises(ControlNetUnavailable):
        ask.open(fleet.client())
    assert isinstance(_answers(first, ask, session)[0], Residuals)
