"""Which models stay in memory, by what a process holds: both the process and the clock are the test's."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from fakes.engine import FakeProvider
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.models.pool import ModelPool
from plait_serving.diffusion.models.switching import PATIENCE
from plait_serving.diffusion.queue.costs import StepCosts

MB = 1_000_000
WEIGHTS, PROGRAMS = 20 * MB, 500 * MB
WAIT_S = 60.0


@dataclass(eq=False)
class SimpleEncoders:
    """Those of all models."""

    reading: set[str]

    def is_like(self, _: object) -> bool:
        return False

    def leave(self) -> None:
        self.reading.clear()


@dataclass
class Server:
    """A process whose models take `WEIGHTS` when they are loaded, and grow to `PROGRAMS` more, a tenth a second, while
    they step. One second passes at each step. Each model but those of `bare` has a text encoder of `encoder` bytes,
    which comes with it, and for a request. Loading one takes `load_s`."""

    names: tuple[str, ...]
    budget: int
    host: int = 1 << 50
    known: int = 0  # what is read of all models before the first is loaded: names, tokenizers
    now_s: float = 0.0
    load_s: float = 0.0
    encoder: int = 0
    bare: tuple[str, ...] = ()
    reading: set[str] = field(default_factory=set)  # the models whose text encoders are here
    base: int = 300 * MB
    garbage: int = 0
    held: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    jobs: list[SimpleNamespace] = field(default_factory=list)
    decoding: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pool = ModelPool(
            [self.model(name) for name in self.names],
            budget_bytes=self.budget,
            clock=lambda: self.now_s,
            wake=lambda: None,
            open_models=lambda: {job.request.model for job in self.jobs} | self.decoding,
            memory=MemoryReader(
                held_bytes=self.total, left_bytes=lambda: self.host - self.total(), give_back=self.give_back
            ),
        )
        self.base += self.known
        self.encoders = SimpleEncoders(self.reading)
        self.pool.encoders.like(self.encoders)
        self.pool.load_first()

    def total(self) -> int:
        return self.base + self.garbage + sum(self.held.values()) + self.encoder * len(self.reading)

    def give_back(self) -> None:
        self.garbage = 0

    def model(self, name: str) -> Model:
        encoder = 0 if name in self.bare else self.encoder

        def load() -> SimpleNamespace:
            self.now_s += self.load_s
            self.held[name] = WEIGHTS
            self.reading |= {name} - {*self.bare}
            return SimpleNamespace()

        def leave() -> None:
            del self.held[name]
            self.reading.discard(name)

        def shared_bytes(*, left: bool = False) -> int:
            return 0 if left or (name in self.held and name not in self.reading) else encoder

        family = SimpleNamespace(
            weights_bytes=WEIGHTS, load=load, leave=leave, visiting_bytes=encoder, shared_bytes=shared_bytes,
        )  # fmt: skip
        return Model(name=name, family=family, limits=ImageLimits(), loras=FakeProvider(), costs=StepCosts())

    def ask(self, name: str, steps: int) -> SimpleNamespace:
        """A request of so many steps."""
        job = SimpleNamespace(
            request=SimpleNamespace(model=name), spent=SimpleNamespace(accepted_at_s=self.now_s), units=[],
            deadline_at_s=None, left_s=float(steps), steps=steps, has_begun=False,
        )  # fmt: skip
        self.jobs.append(job)
        return job

    def pass_second(self) -> None:
        """Tend the models, and run a step of the oldest request whose model is here."""
        self.now_s += 1.0
        failed = self.pool.tend(self.jobs)
        assert not failed
        for thread in threading.enumerate():
            if thread.name == "plait-load-model":
                thread.join(WAIT_S)
        job = next((job for job in self.jobs if self.pool.may_run(job)), None)
        if job is not None:
            name = job.request.model
            if not job.has_begun and name not in (*self.reading, *self.bare):
                self.pool.encoders.leave()
                self.reading.add(name)
            self.held[name] = min(WEIGHTS + PROGRAMS, self.held[name] + PROGRAMS // 10)
            job.has_begun, job.steps, job.left_s = True, job.steps - 1, job.left_s - 1.0
            self.pool.stepped([job], self.jobs, 1.0)
            if not job.steps:
                self.jobs.remove(job)
        self.peak = max(self.peak, self.total())

    def run(self, most_s: int = 10_000) -> None:
        """Until all requests have ended."""
        for _ in range(most_s):
            if not self.jobs:
                return
            self.pass_second()
        raise AssertionError(f"{len(self.jobs)} requests are left")

    @property
    def resident(self) -> set[str]:
        return set(self.pool.statistics().resident)


def test_what_is_known_of_all_models_is_held_by_none_of_them():
    """It lies beside the weights, is there once, and is not expected of a model that is to be loaded."""
    server = Server(("a", "b"), known=400 * MB, budget=(300 + 400) * MB + 2 * (WEIGHTS + PROGRAMS) + 50 * MB)
    for name in ("a", "b"):
        server.ask(name, 12)
        server.run()
    assert server.resident == {"a", "b"}


FOURTEEN = tuple(f"m{i}" for i in range(14))


@pytest.mark.parametrize("at_once", [False, True])
def test_fourteen_small_models_stay_in_their_budget_by_what_they_hold(at_once):
    """Their weights are 280 MB, with their programs they would hold 7.3 GB. Each request is answered, in any order; the
    process is never larger than the budget by a tenth."""
    budget = 4 << 30
    server = Server(FOURTEEN, budget)
    for _ in range(3):
        for name in FOURTEEN:
            server.ask(name, steps=15)
            if not at_once:
                server.run()
        server.run()
    assert server.peak <= 1.1 * budget
    assert server.pool.statistics().nbytes >= 6 * PROGRAMS
    assert server.pool.statistics().nbytes == server.total() - server.base


def test_no_model_starves_beside_floods_for_others():
    """Two that are always asked for have all the memory: each of four others is loaded after as much overtaking as is
    allowed."""
    rare = ("c", "d", "e", "f")
    server = Server(("a", "b", *rare), budget=300 * MB + 2 * (WEIGHTS + PROGRAMS) + 10 * MB, load_s=3.0)

    def flood() -> bool:
        for name in sorted({"a", "b"} - {job.request.model for job in server.jobs}):
            server.ask(name, steps=1)
        server.pass_second()
        return server.now_s < 10_000

    while server.now_s < 20:
        flood()
    asked_s, jobs = server.now_s, [server.ask(name, steps=1) for name in rare]
    while any(job.steps for job in jobs) and flood():
        pass
    assert server.now_s - asked_s <= len(rare) * 2 * (2 * PATIENCE + 2) * server.load_s


def test_models_leave_before_the_host_has_no_memory():
    """Others take it: one idle model a second leaves, never the last, and none that has requests or decodes images."""
    server = Server(("a", "b", "c", "d"), budget=1 << 40, host=8000 * MB)
    for name in ("a", "b", "c", "d"):
        server.ask(name, steps=12)
        server.run()
    assert server.resident == {"a", "b", "c", "d"}
    assert server.pool.rest_s == 1.0
    server.host = server.total() + 100 * MB
    server.decoding = {"a"}
    server.pass_second()
    assert server.resident == {"a", "c", "d"}
    server.pass_second()
    assert server.resident == {"a", "c", "d"}  # what it held is free now: that is enough
    server.host = server.total()
    for _ in range(5):
        server.pass_second()
    assert server.resident == {"a", "d"}
    server.host = 0
    server.decoding = set()
    for _ in range(5):
        server.pass_second()
    assert server.resident == {"d"}
    assert server.pool.rest_s is None
    server.ask("a", steps=1)
    server.run()
    assert server.resident == {"a"}


def test_what_was_freed_is_given_back_before_anybody_leaves():
    """The allocator kept it."""
    server = Server(("a", "b"), budget=1500 * MB)
    for name in ("a", "b"):
        server.ask(name, steps=12)
        server.run()
    server.garbage = 900 * MB
    server.pass_second()
    assert server.garbage == 0
    assert server.resident == {"a", "b"}


def test_text_encoders_make_room_before_a_model_does():
    """Two models and one encoder fit: each model is loaded once, whoever is asked, and the process stays within what it
    may hold. Without room for one encoder a model has to leave."""
    both = 2 * (WEIGHTS + PROGRAMS)
    for room, loads in ((100 * MB, 1), (-100 * MB, 3)):
        server = Server(("a", "b"), encoder=400 * MB, budget=300 * MB + both + 400 * MB + room)
        for name in ("a", "b", "a", "b"):
            server.ask(name, steps=12)
            server.run()
        assert server.pool.statistics().loads == loads
        assert server.peak <= server.budget


def test_room_is_kept_for_the_text_encoder_that_comes_next():
    """When all have left, a model without one does not take it."""
    used = WEIGHTS + PROGRAMS // 10
    server = Server(("a", "b", "x"), encoder=400 * MB, bare=("x",), budget=300 * MB + 3 * used + 390 * MB)
    for name in ("a", "b"):
        server.ask(name, steps=1)
        server.run()
    server.pool.encoders.leave()
    for name in ("x", "a", "b", "x"):
        server.ask(name, steps=1)
        server.run()
    assert server.peak <= server.budget
