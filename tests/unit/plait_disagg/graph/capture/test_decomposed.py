"""Operators that a program does not hold are taken apart, and what cannot be is refused by its own line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import Dense, Ids
from support.graph_scores import assert_same_scores

INPUTS = (Dense("x", shape=(4, 6)), Dense("y", "user", shape=(4, 6)))


class Stepping(nn.Module):
    """A recurrent cell that is called step by step."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(6, 6)

    def forward(self, x, y):
        state = (y[:, 0], y[:, 1]) if isinstance(self.cell, nn.LSTMCell) else y[:, 0]
        for step in range(4):
            state = self.cell(x[:, step], state)
        return (state[0] if isinstance(state, tuple) else state).sum(1)


class Normed(nn.Module):
    """Each row's channels are normalised by their own numbers."""

    def __init__(self, **options):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, **options)

    def forward(self, x, y):
        return (self.norm(x) * y).sum((1, 2))


def written(x, y):
    """Write parts of a value in place, in every way that keeps rows apart."""
    made = x * 2
    made[:, 0] = y[:, 1]
    made[:, 1:3] += y[:, :2]
    made[:, -1, 2:4] = 0.5
    made[:, :, 5] = y[..., 0]
    made[made > 1] = 0.25
    made[(y > 0.5).any(-1)] = -1.0
    whole = torch.zeros(x.shape[0], 4, 6)
    whole[:] = made
    whole[..., 0].fill_(3)
    return (whole * y).sum((1, 2))


def unread(x, y):
    """Change a value that is not read any more, and one that is read through another."""
    made, other = x * 2, x * 3
    made.add_(y)
    other.view(-1, 24).add_(1)
    return (other * y).sum((1, 2))


class Plain(nn.Module):
    """A module of one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


class LastStep(nn.Module):
    """The step before `length`, and one counted from the end: `x[arange(rows), steps]` keeps rows apart."""

    inputs = (Ids("history", "user", (5,)), Ids("length", "user", min=1, max=5), Ids("item"))

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 6)

    def forward(self, history, length, item):
        rows = torch.arange(history.shape[0])
        last = self.table(history)[rows, length - 1]
        return (last * self.table(item)).sum(1) + history[rows, -length] * 0.1


@pytest.mark.parametrize(
    "module",
    [
        LastStep(),
        Stepping(nn.GRUCell),
        Stepping(nn.LSTMCell),
        Stepping(nn.RNNCell),
        Normed(),
        Normed(affine=True, track_running_stats=True),
        Plain(written),
        Plain(unread),
        Plain(lambda x, y: torch.zeros(x.shape[0], 9).scatter_add_(1, (x[:, 0] > 0).long(), y[:, 0]).pow(2).sum(1)),
        Plain(lambda x, y: (x.to(torch.device("cpu")).to(y) + y.to("cpu", torch.float64)).sum((1, 2)).float()),
        Plain(lambda x, y: torch.concat([x, y], 1).sum((1, 2))),
        Plain(lambda x, y: (torch.tile(x, [1, 2, 1]) * torch.concatenate([y, y], 1)).sum((1, 2))),
        Plain(lambda x, y: (torch.roll(x, 1, dims=1) * y.swapaxes(1, 2).reshape(x.shape)).sum((1, 2))),
    ],
    ids=lambda module: module.function.__name__ if isinstance(module, Plain) else type(module).__name__,
)
def test_what_is_taken_apart_scores_as_the_module_does(module):
    """The naive twin is the module itself, on other numbers of rows than traced."""
    torch.manual_seed(0)
    assert_same_scores(module.eval(), getattr(module, "inputs", INPUTS))


def by_place(x, y):
    """Write into the first row."""
    made = x * 1
    made[0] = 0.0
    return (made + y).sum((1, 2))


def by_ids(x, y):
    """Write what the data chooses."""
    made = x * 1
    made[made > 1] = y[made > 1]
    return made.sum((1, 2))


def inverted(x, y):
    """Call what torch checks behind the scenes, in an order that it writes into the trace."""
    return torch.linalg.inv(x[..., :4] + torch.eye(4)).sum((1, 2)) + y.sum((1, 2))


@pytest.mark.parametrize("function", [by_place, by_ids, inverted])
def test_what_writes_among_rows_is_refused_at_its_own_line(function):
    """A helper that forward calls is named, not the line of forward that calls it."""
    with pytest.raises(UnsupportedOperator) as refused:
        capture(Plain(function).eval(), INPUTS)
    assert "test_decomposed.py" in refused.value.where or "test_decomposed.py" in str(refused.value)
    assert "return self.function" not in refused.value.where


@pytest.mark.parametrize("function", [lambda x, y: torch.roll(x, 1, dims=0) + y, lambda x, y: x.sort(0).values + y])
def test_what_moves_rows_is_refused(function):
    """Along the rows nothing may be rolled or sorted."""
    with pytest.raises(UnsupportedOperator, match="along the rows"):
        capture(Plain(lambda x, y: function(x, y).sum((1, 2))).eval(), INPUTS)


def test_another_rows_step_is_refused():
    """Rows in any other order are picked among the rows."""

    class Shifted(LastStep):
        def forward(self, history, length, item):
            rows = torch.arange(history.shape[0]).flip(0)
            return (self.table(history)[rows, length - 1] * self.table(item)).sum(1)

    with pytest.raises(UnsupportedOperator):
        capture(Shifted().eval(), LastStep.inputs)
