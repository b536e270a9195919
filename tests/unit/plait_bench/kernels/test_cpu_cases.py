"""What only a CPU measures: products beside a square product, forms that were tried, lookups, guidance."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from plait_bench.errors import SystemUnavailable
from plait_bench.kernels import benchmark, lookups
from plait_bench.kernels.cases import OperatorCase, multiplied
from plait_bench.kernels.guided import GuidedUpdate
from plait_bench.kernels.merging import TRIED, merge_cases
from plait_bench.kernels.timing import CpuTimer
from plait_bench.kernels.tried import tried_cases
from plait_bench.kernels.workload import EAGER, MATMUL, OperatorWorkload
from plait_bench.runner import RunPlan, joined, run
from plait_serving.diffusion import preparation

PRODUCT = OperatorCase(
    name="product",
    op="product",
    moved=3 * 8 * 8,
    make=lambda device, dtype: (torch.ones(8, 8, device=device, dtype=dtype),) * 2,
    plait=None,
    eager=torch.mm,
    others={TRIED: lambda: torch.matmul, "absent": lambda: _absent()},
    flops=2.0 * 8**3,
    compiles=False,
)


def _absent():
    raise SystemUnavailable("absent: not installed")


class Clock(CpuTimer):
    """Every call takes a microsecond."""

    def elapsed_s(self, run, times):
        """A microsecond for each of three calls."""
        run()
        return 1e-6 * times * 3

    def sets(self, nbytes):
        """Three."""
        return 3


def test_a_product_is_measured_beside_a_square_product():
    """1,024 operations in a microsecond; eager is ours where plait has no form; who is not installed is left out."""
    workload = OperatorWorkload(PRODUCT, Clock())
    found = joined(
        list(run(dataclasses.replace(benchmark(), workloads=(workload,)), RunPlan(rounds=2), say=lambda _: None))
    )
    rows = {(row.system, row.metric): row.value for row in found.rows}
    assert rows[EAGER, "gflops"] == pytest.approx(1.024)
    assert rows[TRIED, "share_of_matmul"] == pytest.approx(1.0)
    assert (MATMUL, "share_of_matmul") not in rows
    assert "product:time_us:eager/tried" in found.ratios
    assert set(found.left_out) == {"absent"}
    assert multiplied(2.0 * 8**3)("cpu", torch.float32)[0].shape == (8, 8)


@pytest.mark.parametrize("case", [*tried_cases(), *merge_cases()], ids=lambda case: case.name)
def test_what_was_tried_computes_the_same(case):
    """A form that is compared in time has the eager form's result."""
    torch.manual_seed(0)
    arguments = case.make("cpu", torch.float32)
    wanted = case.eager(*arguments).clone()
    for form in [make() for name, make in case.others.items() if name == TRIED] + [case.plait or case.eager]:
        assert torch.allclose(form(*arguments), wanted, atol=1e-4)


def test_lookups_compare_the_same_rows(monkeypatch):
    """int8 rows are the float32 rows within their step, on a small table; fbgemm's too where it is installed."""
    monkeypatch.setattr(lookups, "_ROWS", 1000)
    for made in (lookups._table, lookups._stored, lookups._fbgemm):
        made.cache_clear()
    try:
        (case, *_) = lookups.lookup_cases()
        arguments = case.make("cpu", torch.float32)
        forms = [case.plait]
        try:
            forms += [make() for make in case.others.values()]
        except SystemUnavailable as error:
            assert "fbgemm" in str(error)  # noqa: PT017
        for form in forms:
            assert (form(*arguments) - case.eager(*arguments)).abs().max() < 20 * 2 / 255
    finally:
        for made in (lookups._table, lookups._stored, lookups._fbgemm):
            made.cache_clear()


def test_guidance_is_a_share_of_a_step(monkeypatch):
    """On torch here: it takes time, and less than the whole step."""
    monkeypatch.setattr(preparation, "preparer_for", lambda *_, **__: None)
    with GuidedUpdate(16).open("plait", "") as subject:
        subject.warm_up()
        found = {reading.metric: reading.value for reading in subject.measure(1)}
    assert found["time_us"] > 0.0
    assert 0.0 < found["share_of_step"] < 1.0
