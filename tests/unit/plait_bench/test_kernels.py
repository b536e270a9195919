"""The benchmark of single operators: what it counts, that forms agree, and that it needs neither Ray nor diffusers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fakes.bench import measured
from plait_bench.errors import Disagreement
from plait_bench.kernels import (
    COPY,
    PLAIT,
    DeviceTimer,
    OperatorCase,
    OperatorWorkload,
    cases,
)
from plait_bench.runner import RunPlan

TINY = OperatorCase(
    name="double",
    moved=2 * 1000,
    make=lambda device, dtype: (torch.ones(1000, device=device, dtype=dtype),),
    plait=lambda x: x * 2,
    eager=lambda x: x + x,
)


class SlowClock(DeviceTimer):
    """A timer whose calls take a microsecond each."""

    def per_call_s(self, run, calls):
        run()
        return 1e-6 * calls / self.sets(8000)

    def sets(self, nbytes):
        return 3


def played(workload: OperatorWorkload):
    """The result of two rounds. torch.compile would take a C++ compiler long."""
    with torch.compiler.set_stance("force_eager"):
        return measured((workload,), RunPlan(rounds=2))


def test_a_copy_that_moves_as_much_stands_beside_every_form():
    """A microsecond each, and a ratio of one."""
    result = played(OperatorWorkload(TINY, SlowClock("cpu")))
    rows = {(row.system, row.metric): row.value for row in result.rows}
    assert rows[PLAIT, "time_us"] == pytest.approx(1.0)
    assert (COPY, "time_us") in rows
    assert result.ratios[f"double:time_us:{PLAIT}/{COPY}"].value == pytest.approx(1.0)


def test_forms_that_disagree_are_not_timed():
    """A fast wrong answer is no result."""
    wrong = dataclasses.replace(TINY, plait=lambda x: x * 2.2)
    with pytest.raises(Disagreement, match="plait differs"):
        played(OperatorWorkload(wrong, SlowClock("cpu")))


@pytest.mark.parametrize("case", cases("cuda"), ids=lambda case: case.name)
def test_every_case_moves_what_it_says(case):
    """Inputs and result, counted from the tensors themselves; vectors beside them are a few hundredths."""
    with torch.device("meta"):
        arguments = case.make("meta", torch.float16)
    flat = [one for each in arguments for one in (each if isinstance(each, list) else [each])]
    counted = sum(map(torch.Tensor.numel, flat)) + case.eager(*arguments).numel()
    assert case.moved <= counted <= case.moved * 1.02 + 100
