"""Which thread decodes, and in what order."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from plait_serving.diffusion.decoding import DecodeQueue, decodes_here

COMPUTE = threading.current_thread().name
SMALL, LARGE = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 4, 4)


def test_an_accelerator_decodes_beside_whatever_runs() -> None:
    """However long it takes; on a CPU idle cores and long decodes belong to the compute thread."""
    assert not decodes_here(on_cpu=False, stepping=False, expected_s=5.0)
    assert decodes_here(on_cpu=True, stepping=False, expected_s=0.001)


class Rig:
    """A queue whose decodes take as long as told, and where they ran."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ran: list[tuple[str, str]] = []
        self.pinned: list[int] = []
        self.queue = DecodeQueue(set_threads=self.pinned.append, clock=lambda: self.now_s)

    def submit(
        self, name: str, latents: torch.Tensor, *, takes_s: float, decodes: bool = True,
        after: threading.Event | None = None, tenant: str = "a",
    ) -> None:  # fmt: skip
        """Submit a decode of a tenant; it first waits for `after`."""

        def use(_: torch.Tensor) -> bool:
            assert after is None or after.wait(60)
            self.now_s += takes_s
            self.ran.append((name, threading.current_thread().name.partition("_")[0]))
            return decodes

        self.queue.submit(tenant, latents, use)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig whose threads end with the test."""
    it = Rig()
    yield it
    it.queue.close()


def test_each_size_is_timed_once_and_then_placed(rig: Rig) -> None:
    """A short decode beside steps goes to the decode thread (of one thread), a long one stays, one per call."""
    for name, latents, takes_s in (("a", SMALL, 0.01), ("b", LARGE, 2.0), ("c", SMALL, 0.01), ("d", LARGE, 2.0)):
        rig.submit(name, latents, takes_s=takes_s)
    assert [rig.queue.run_next(stepping=True) for _ in range(4)] == [True, True, True, False]
    assert rig.ran == [("a", COMPUTE), ("b", COMPUTE), ("c", "plait-decode"), ("d", COMPUTE)]
    assert rig.pinned == [1]


def test_what_is_decoded_here_waits_for_what_went_before(rig: Rig) -> None:
    """A preview that runs aside is delivered before the images of its request."""
    go = threading.Event()
    rig.submit("first", SMALL, takes_s=0.01)
    rig.queue.run_next(stepping=True)
    rig.submit("preview", SMALL, takes_s=0.01, after=go)
    assert not rig.queue.run_next(stepping=True)
    rig.submit("images", SMALL, takes_s=0.01)
    threading.Timer(0.01, go.set).start()
    assert rig.queue.run_next(stepping=False)
    assert rig.ran == [("first", COMPUTE), ("preview", "plait-decode"), ("images", COMPUTE)]


def test_tenants_take_turns_beside_steps(rig: Rig) -> None:
    """Of many decodes that one tenant has waiting beside steps, another's single one waits for the one that runs."""
    go = threading.Event()
    rig.submit("first", SMALL, takes_s=0.01)
    rig.queue.run_next(stepping=True)
    rig.submit("runs", SMALL, takes_s=0.01, after=go)
    rig.queue.run_next(stepping=True)
    for name in ("flood 1", "flood 2", "flood 3"):
        rig.submit(name, SMALL, takes_s=0.01)
    rig.queue.run_next(stepping=True)
    rig.submit("other", SMALL, takes_s=0.01, tenant="b")
    rig.queue.run_next(stepping=True)
    go.set()
    rig.queue.close()
    order = [name for name, _ in rig.ran]
    assert order[2:].index("other") <= 1
    assert [name for name in order if name.startswith("flood")] == ["flood 1", "flood 2", "flood 3"]


def test_a_decode_that_was_not_needed_is_no_measurement(rig: Rig) -> None:
    """A cancelled request does not make its size look quick."""
    rig.submit("long", SMALL, takes_s=2.0)
    rig.submit("cancelled", SMALL, takes_s=0.0, decodes=False)
    rig.submit("long again", SMALL, takes_s=2.0)
    while rig.queue.run_next(stepping=True):
        pass
    assert [thread for _, thread in rig.ran] == [COMPUTE] * 3


def test_closing_decodes_what_waits() -> None:
    """Nothing that was submitted is lost when the engine stops; closing twice is closing."""
    rig = Rig()
    rig.submit("a", SMALL, takes_s=0.0)
    rig.submit("b", LARGE, takes_s=0.0)
    rig.queue.close()
    rig.queue.close()
    assert [name for name, _ in rig.ran] == ["a", "b"]
