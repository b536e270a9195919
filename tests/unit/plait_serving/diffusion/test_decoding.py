"""Which thread decodes, and in what order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from plait_serving.diffusion import decoding
from plait_serving.diffusion.decoding import DecodeQueue

COMPUTE = threading.current_thread().name
LATENTS = torch.zeros(1, 1, 2, 2)


class Rig:
    """A queue of decodes, and where they ran."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []
        self.queue = DecodeQueue(lambda: 0.0)

    def submit(self, name: str, *, after: threading.Event | None = None, tenant: str = "a") -> None:
        """Submit a decode of a tenant; it first waits for `after`."""

        def use(_: torch.Tensor) -> None:
            assert after is None or after.wait(60)
            self.ran.append((name, threading.current_thread().name.partition("_")[0]))

        self.queue.submit(tenant, LATENTS, use)

    @property
    def order(self) -> list[str]:
        """What was decoded, in its order."""
        return [name for name, _ in self.ran]


@pytest.fixture
def rig_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Rig]]:
    """`rig_on(device)`: a rig for it whose threads end with the test."""
    made: list[Rig] = []

    def build(device: str) -> Rig:
        monkeypatch.setattr(decoding, "is_gpu", lambda _: device == "gpu")
        made.append(Rig())
        return made[-1]

    yield build
    for it in made:
        it.queue.close()


def test_a_cpu_decodes_between_steps(rig_on: Callable[[str], Rig]) -> None:
    """On the compute thread, which has all cores, one per call."""
    rig = rig_on("cpu")
    for name in ("a", "b"):
        rig.submit(name)
    assert [rig.queue.run_next() for _ in range(3)] == [True, True, False]
    assert rig.ran == [("a", COMPUTE), ("b", COMPUTE)]


def test_an_accelerator_decodes_beside_whatever_runs(
    rig_on: Callable[[str], Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a thread of one core, which waits for it."""
    pinned: list[int] = []
    monkeypatch.setattr(decoding, "set_threads", pinned.append)
    rig = rig_on("gpu")
    rig.submit("a")
    assert not rig.queue.run_next()
    rig.queue.close()
    assert rig.ran == [("a", "plait-decode")]
    assert pinned == [1]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_tenants_take_turns(rig_on: Callable[[str], Rig], device: str) -> None:
    """Of many decodes that one tenant has waiting, another's single one waits for one beside the one that runs."""
    rig, go = rig_on(device), threading.Event()
    rig.submit("runs", after=go)
    for name in ("flood 1", "flood 2", "flood 3"):
        rig.submit(name)
    rig.submit("other", tenant="b")
    go.set()
    rig.queue.close()
    assert rig.order.index("other") <= 2
    assert [name for name in rig.order if name.startswith("flood")] == ["flood 1", "flood 2", "flood 3"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_closing_decodes_what_waits(rig_on: Callable[[str], Rig], device: str) -> None:
    """Nothing that was submitted is lost when the engine stops; closing twice is closing."""
    rig = rig_on(device)
    rig.submit("a")
    rig.submit("b")
    rig.queue.close()
    rig.queue.close()
    assert rig.order == ["a", "b"]
