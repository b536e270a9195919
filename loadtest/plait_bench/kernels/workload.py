"""One case as a workload: plait's form, eager torch, `torch.compile`, and the copy that they are measured against."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from plait_bench.benchmark import Metric, Reading, ResultRow, Subject, Workload
from plait_bench.errors import Disagreement
from plait_bench.kernels.cases import Arguments, Form, OperatorCase, calls, copied, multiplied
from plait_bench.kernels.timing import Call, DeviceTimer

PLAIT, EAGER, COMPILED, COPY, MATMUL = "plait", "eager", "torch.compile", "copy", "matmul"
_SHARES = {COPY: "share_of_copy", MATMUL: "share_of_matmul"}
_TOLERANCE = 4e-2
"""Largest difference between systems, relative to the largest value: they round to the dtype at different places."""


class FormSubject:
    """One form, captured on several sets of inputs."""

    def __init__(self, form: Form, case: OperatorCase, clock: DeviceTimer, sets: Sequence[Arguments]) -> None:
        self._form, self._case, self._clock, self._sets = form, case, clock, sets
        self._run: Call | None = None

    def answer(self) -> torch.Tensor:
        """Return the result on a copy of the first inputs: some operators write in place."""
        result = self._form(*_copied(self._sets[0]))
        assert isinstance(result, torch.Tensor)
        return result.float()

    def warm_up(self) -> None:
        """Compile, capture, and run once."""
        if self._run is None:
            self._run = self._clock.prepare(calls(self._form, self._sets))
        self._clock.elapsed_s(self._run, 1)

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Return the time and what it means as bandwidth, or as operations per second."""
        assert self._run is not None
        taken_s = self._clock.per_call_s(self._run, len(self._sets))
        nbytes = self._case.moved * self._clock.dtype.itemsize
        rate = ("gflops", self._case.flops) if self._case.flops else ("bandwidth", nbytes)
        return [
            Reading(metric="time_us", value=taken_s * 1e6, layout=self._clock.name),
            Reading(metric=rate[0], value=rate[1] / taken_s / 1e9, layout=self._clock.name),
        ]


def _copied(arguments: Arguments) -> Arguments:
    return tuple(
        each.clone() if isinstance(each, torch.Tensor) else [one.clone() for one in each] for each in arguments
    )


class OperatorWorkload(Workload):
    """All systems on one case; a share of the copy, or of the product, is taken inside each round."""

    metrics: Mapping[str, Metric] = {
        "time_us": Metric(unit="us", better="lower"),
        "bandwidth": Metric(unit="GB/s", better="higher"),
        "gflops": Metric(unit="GFLOP/s", better="higher"),
        "share_of_copy": Metric(unit="share", better="higher"),
        "share_of_matmul": Metric(unit="share", better="higher"),
    }
    compared = frozenset({"time_us"})

    def __init__(self, case: OperatorCase, clock: DeviceTimer) -> None:
        self.name = case.name
        self._case, self._clock = case, clock
        self._ceiling = MATMUL if case.flops else COPY
        compiled = (COMPILED,) if case.compiles and _compiles(clock.device) else ()
        own = (PLAIT,) if case.plait is not None else ()
        self.systems = (*own, EAGER, *compiled, *case.others, self._ceiling)
        self.ours = self.systems[0]
        self.pairs = tuple((self.ours, other) for other in self.systems[1:-1])
        self._made: dict[str, list[Arguments]] = {}

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make the inputs and the form."""
        del layout
        with torch.inference_mode():
            yield FormSubject(self._form(system), self._case, self._clock, self._inputs(system))
        self._made.clear()

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        """Compare the forms' results. Raises `Disagreement`."""
        answers = {
            name: subject.answer() for name, subject in subjects.items()
            if isinstance(subject, FormSubject) and name != self._ceiling
        }  # fmt: skip
        if (reference := answers.get(EAGER)) is not None:
            for name, answer in answers.items():
                error = float((answer - reference).abs().max() / reference.abs().max())
                if not error <= _TOLERANCE:
                    raise Disagreement(f"{self.name}: {name} differs from {EAGER} by {error:.2g} of the largest value")
        return ()

    def derive(self, readings: Mapping[str, Sequence[Reading]]) -> Sequence[Reading]:
        """Return the share of the copy's bandwidth, or of the product's speed, that each system reached in this
        round."""
        times = {
            system: reading.value for system, found in readings.items() for reading in found
            if reading.metric == "time_us"
        }  # fmt: skip
        ceiling_us = times.pop(self._ceiling, None)
        if ceiling_us is None:
            return ()
        share = _SHARES[self._ceiling]
        return [
            Reading(metric=share, value=ceiling_us / taken_us, system=system, layout=self._clock.name)
            for system, taken_us in times.items()
        ]

    def _form(self, system: str) -> Form:
        if system == self._ceiling:
            return torch.clone if system == COPY else torch.mm
        if system in self._case.others:
            return self._case.others[system]()
        if system == COMPILED:
            torch.compiler.reset()  # else sizes of one function would share its few places for compiled code
            compiled: Form = torch.compile(self._case.eager, dynamic=False)
            return compiled
        form = self._case.plait if system == PLAIT else self._case.eager
        assert form is not None
        return form

    def _inputs(self, system: str) -> list[Arguments]:
        """Return the sets of inputs, the same for all systems but the ceiling."""
        kind = self._ceiling if system == self._ceiling else PLAIT
        if kind not in self._made:
            make = self._case.make
            if kind == self._ceiling:
                make = multiplied(self._case.flops) if kind == MATMUL else copied(self._case.moved)
            count = self._clock.sets(self._case.moved * self._clock.dtype.itemsize)
            self._made[kind] = [make(self._clock.device, self._clock.dtype) for _ in range(count)]
        return self._made[kind]


def _compiles(device: str) -> bool:
    """Return whether torch.compile has what it needs: Triton comes with torch for a GPU; a CPU needs a compiler."""
    return device == "cuda" or any(shutil.which(name) for name in ("g++", "clang++"))
