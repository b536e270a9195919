"""Programs that compute something else than torch are found, switched off where they do, and their answers kept."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait_kernels.executors import RowFactors
from plait_kernels.executors.audit import AuditedProgram, Auditor, AuditPlan
from plait_kernels.executors.torch_program import TorchProgram
from support.executors import small_block, small_computation, small_factors, small_inputs

TOLERANCE = 1e-4


class WrongSomewhere(TorchProgram):
    """A program that adds `error` to one of its outputs where `where(inputs)`."""

    def __init__(self, where: Callable[[Sequence[torch.Tensor]], bool], error: float = 1.0, output: int = 0) -> None:
        super().__init__(small_computation(small_block()))
        self.where, self.error, self.output, self.calls = where, error, output, 0

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute, and spoil."""
        self.calls += 1
        outputs = list(super().run(inputs, factors, copy=copy))
        if self.where(inputs):
            outputs[self.output] = outputs[self.output] + self.error
        return tuple(outputs)


def reference() -> TorchProgram:
    """What defines the programs here."""
    return TorchProgram(small_computation(small_block()))


def auditor_in(folder: Path | None = None, *, idle: Callable[[], bool] = lambda: True, **plan: int) -> Auditor:
    """One that waits for nothing."""
    return Auditor(AuditPlan(folder=folder, quiet_s=0.0, **{"every": 1000, **plan}), idle=idle)


def watched(auditor: Auditor, program: TorchProgram) -> AuditedProgram:
    """The program, audited."""
    audited = auditor.watch("block", program, reference, tolerance=TOLERANCE)
    assert isinstance(audited, AuditedProgram)
    return audited


def test_a_program_that_is_wrong_at_one_shape_of_many_is_found(tmp_path, caplog):
    """Its wrong answer goes out once; from then on torch runs that shape, and no other. Both answers are kept."""
    auditor = auditor_in(tmp_path / "audit")
    program = WrongSomewhere(lambda inputs: inputs[0].shape[2:] == (6, 9))
    audited = watched(auditor, program)
    sides = [(height, width) for height in range(4, 8) for width in range(7, 11)]
    with caplog.at_level(logging.ERROR):
        for height, width in sides:
            audited.run(small_inputs(1, height, width))
        auditor.wait()
    found = auditor.statistics()
    assert (found.checked, found.drifted, found.skipped, found.failed) == (16, 1, 0, 0)
    assert found.largest > 1.0
    assert ["[1, 6, 6, 9]" in record.message for record in caplog.records] == [True]
    before, torchs = program.calls, reference()
    for height, width in sides:
        inputs = small_inputs(1, height, width, seed=5)
        for ours, wanted in zip(audited.run(inputs), torchs.run(inputs), strict=True):
            assert torch.equal(ours, wanted)
    assert program.calls == before + 15
    (path,) = (tmp_path / "audit").iterdir()
    kept = load_file(path)
    assert torch.equal(kept["input.0"], small_inputs(1, 6, 9)[0])
    assert float((kept["answer.0"] - kept["torch.0"]).mean()) == pytest.approx(1.0, abs=1e-4)


def test_a_program_that_drifts_at_many_shapes_is_trusted_with_none():
    """So what is remembered of it is bounded, whatever shapes a client asks for."""
    program = WrongSomewhere(lambda inputs: True)
    watch = auditor_in(known_shapes=3)
    audited = watched(watch, program)
    for size in range(1, 9):
        audited.run(small_inputs(1, size, size))
        watch.wait()
    assert watch.statistics().drifted == 3
    assert program.calls == 3
    inputs = small_inputs(1, 9, 9)
    assert torch.equal(audited.run(inputs)[0], reference().run(inputs)[0])


def test_a_shape_is_audited_once_and_then_one_call_in_so_many():
    """The first call of each shape and rank of factors; later the hundredth, two hundredth, ..."""
    auditor = auditor_in(every=100)
    audited = watched(auditor, WrongSomewhere(lambda _: False))
    plain, factors = small_inputs(2, 4, 4), small_factors([{"point": 2}] * 2)
    for _ in range(3):
        audited.run(plain)
        audited.run(plain, factors)
    auditor.wait()
    assert auditor.statistics().checked == 2
    for _ in range(194):
        audited.run(plain)
    auditor.wait()
    assert auditor.statistics().checked == 4
    assert audited.layers == reference().layers


@pytest.mark.parametrize(("error", "output"), [(float("nan"), 0), (float("inf"), -1)])
def test_what_is_no_number_drifts(error, output):
    """NaN and infinity are no answers of torch here, whichever output has them."""
    auditor = auditor_in()
    audited = watched(auditor, WrongSomewhere(lambda _: True, error, output))
    audited.run(small_inputs(1, 4, 4))
    auditor.wait()
    assert auditor.statistics().drifted == 1


def bytes_of_a_call() -> int:
    """What the inputs and outputs of `small_inputs(1, 4, 4)` take."""
    inputs = small_inputs(1, 4, 4)
    return sum(value.nbytes for value in (*inputs, *reference().run(inputs)))


@pytest.mark.parametrize(("room", "factors"), [(2.0, small_factors([{"point": 2}])), (0.1, None)])
def test_what_waits_takes_room_and_is_one_call_at_least(room, factors):
    """Factors that only a waiting call keeps, too: a batch that has ended leaves them to it. Halves of large models are
    larger than the room, and are audited alone."""
    busy = threading.Event()
    auditor = auditor_in(idle=busy.is_set, pending_bytes=int(room * bytes_of_a_call()))
    audited = watched(auditor, WrongSomewhere(lambda _: False))
    audited.run(small_inputs(1, 4, 4))
    audited.run(small_inputs(1, 4, 4) if factors else small_inputs(1, 2, 8), factors)
    busy.set()
    auditor.wait()
    found = auditor.statistics()
    assert (found.checked, found.skipped) == (1, 1)


def test_nothing_is_computed_while_others_compute():
    """Calls wait for an idle moment; where there is no room left, they are let go, and the next of their shape may."""
    busy = threading.Event()
    auditor = auditor_in(idle=busy.is_set, pending_bytes=2 * bytes_of_a_call())
    audited = watched(auditor, WrongSomewhere(lambda _: False))
    for height, width in ((4, 4), (2, 8), (8, 2), (8, 2)):
        audited.run(small_inputs(1, height, width))
    assert auditor.statistics().checked == 0
    assert auditor.statistics().skipped == 1
    busy.set()
    auditor.wait()
    assert auditor.statistics().checked == 2
    for _ in range(2):
        audited.run(small_inputs(1, 8, 2))
    auditor.wait()
    assert auditor.statistics().checked == 3


def test_an_audit_stops_when_a_request_comes():
    """Between two of the reference's operations it asks whether others compute, and goes on once they do not."""
    idle = iter([True, True, True, False, False])
    auditor = auditor_in(idle=lambda: next(idle, True))
    audited = watched(auditor, WrongSomewhere(lambda _: False))
    audited.run(small_inputs(1, 4, 4))
    auditor.wait()
    assert auditor.statistics().checked == 1
    assert list(idle) == []


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_the_reference_is_let_go_once_nothing_waits(error):
    """With the pages of its weights; it stays where it runs a shape that drifted."""
    made: list[weakref.ref[TorchProgram]] = []

    def make() -> TorchProgram:
        one = reference()
        made.append(weakref.ref(one))
        return one

    auditor = auditor_in()
    audited = auditor.watch("block", WrongSomewhere(lambda _: True, error), make, tolerance=TOLERANCE)
    audited.run(small_inputs(1, 4, 4))
    auditor.wait()
    gc.collect()
    assert [one() is not None for one in made] == [error > 0]


def test_a_program_that_is_forgotten_is_let_go_also_where_its_audit_waits():
    """Its model has left memory, and others compute without a pause."""
    idle, waits = [True], threading.Event()

    def is_idle() -> bool:
        if not idle[0]:
            waits.set()
        return idle[0]

    def made() -> TorchProgram:
        idle[0] = False  # from here on others compute
        return reference()

    auditor = auditor_in(idle=is_idle)
    program = WrongSomewhere(lambda _: False)
    audited = auditor.watch("block", program, made, tolerance=TOLERANCE)
    for rows in (1, 2):
        audited.run(small_inputs(rows, 4, 4))
    assert waits.wait(60.0)
    left = weakref.ref(program)
    del program, audited
    auditor.forget()
    for _ in range(60):
        gc.collect()
        if left() is None:
            break
        threading.Event().wait(0.5)
    is_gone = left() is None
    idle[0] = True
    auditor.wait()
    assert is_gone
    assert auditor.statistics().failed == 0


def test_no_audit_leaves_the_program_as_it_is():
    """`every` 0."""
    program = WrongSomewhere(lambda _: False)
    assert auditor_in(every=0).watch("block", program, reference, tolerance=TOLERANCE) is program


def test_a_reference_that_fails_stops_nothing(caplog):
    """It is logged and counted; the program goes on, and so does the audit of others."""

    def broken() -> TorchProgram:
        raise RuntimeError("the file is gone")

    auditor = auditor_in()
    audited = auditor.watch("block", WrongSomewhere(lambda _: False), broken, tolerance=TOLERANCE)
    for rows in (1, 2):
        audited.run(small_inputs(rows, 4, 4))
    auditor.wait()
    assert auditor.statistics().failed == 2
    assert "block could not be audited" in caplog.text
