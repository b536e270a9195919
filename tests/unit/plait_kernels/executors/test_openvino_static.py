"""A program for one set of shapes against its module: all rows, fewer rows, integers, and what a call leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait_kernels.executors import Computation, ExecutorError, InputSpec, RowFactors
from plait_kernels.executors.openvino_executor import OpenVinoSettings

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors.openvino_static import StaticPrograms  # after the skip

ONE = OpenVinoSettings(threads=lambda: 1)


class Picks(nn.Module):
    """A user's row (1, 4) beside items (R, 3) that pick one of its numbers each; `on` (R,) switches rows off."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(4, 5), nn.Linear(3, 5)

    def forward(self, user, item, pick, on):
        both = torch.relu(self.user(user).expand(item.shape[0], 5) + self.item(item))
        picked = user.reshape(-1).index_select(0, pick)
        return both.sum(1) + picked * on.to(torch.float32), both


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Picks().eval().requires_grad_(requires_grad=False)


def inputs(rows, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, 4, generator=rng), torch.randn(rows, 3, generator=rng),
        torch.randint(0, 4, (rows,), generator=rng), torch.rand(rows, generator=rng) > 0.5,
    ]  # fmt: skip


def computation(module):
    specs = (
        InputSpec(name="user", shape=(None, 4)), InputSpec(name="item", shape=(None, 3)),
        InputSpec(name="pick", shape=(None,), dtype=torch.int64), InputSpec(name="on", shape=(None,), dtype=torch.bool),
    )  # fmt: skip
    return Computation(module=module, inputs=specs, example=tuple(inputs(3)))


@pytest.fixture(scope="module")
def program(module):
    return StaticPrograms(computation(module)).compile([(1, 4), (8, 3), (8,), (8,)], ONE)


@pytest.mark.parametrize("rows", [8, 5, 1])
def test_it_computes_what_the_module_does_for_all_rows_and_fewer(program, module, rows):
    """Outputs have all rows; those of the call are right."""
    given = inputs(rows, seed=rows)
    for got, wanted in zip(program.run(given), module(*given), strict=True):
        torch.testing.assert_close(got[:rows], wanted, rtol=1e-5, atol=1e-6)


def test_rows_of_an_earlier_call_do_not_reach_a_later_one(program, module):
    """What is behind the rows of a call is of the call before, even if that was NaN."""
    poison = [torch.full_like(value, float("nan")) if value.is_floating_point() else value for value in inputs(8)]
    assert program.run(poison)[0].isnan().all()
    given = inputs(3, seed=1)
    torch.testing.assert_close(program.run(given)[0][:3], module(*given)[0], rtol=1e-5, atol=1e-6)


def test_an_answer_is_the_callers_own_unless_it_wants_none(program):
    """A later call changes only what was not copied."""
    first = program.run(inputs(8))[0]
    kept = first.clone()
    shared = program.run(inputs(8, seed=1), copy=False)[0]
    assert torch.equal(first, kept)
    program.run(inputs(8, seed=2))
    assert not torch.equal(shared, kept)
    assert program.layers == ()


class Nonzero(nn.Module):
    """Whose output has no fixed shape: its memory would move from call to call."""

    def forward(self, x):
        return (x.nonzero(),)


def test_what_no_program_takes_is_refused(program, module):
    """By name: factors, other numbers of inputs, shapes that do not fit, outputs without one."""
    with pytest.raises(ExecutorError, match="no factors"):
        program.run(inputs(8), RowFactors(rows=8, by_path={}))
    with pytest.raises(ValueError, match="argument"):
        program.run(inputs(8)[:2])
    with pytest.raises(ExecutorError, match="compiling failed"):
        StaticPrograms(computation(module)).compile([(1, 4), (8, 7), (8,), (8,)], ONE)
    given = Computation(module=Nonzero(), inputs=(InputSpec(name="x", shape=(None, 2)),), example=(torch.ones(2, 2),))
    with pytest.raises(ExecutorError, match="shape"):
        StaticPrograms(given).compile([(4, 2)], ONE)
