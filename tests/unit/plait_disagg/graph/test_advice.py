"""What the author of a model is told about its cut."""

from __future__ import annotations

import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.inputs import Dense, Ids
from plait_disagg.graph.report import advice
from plait_disagg.graph.split import split
from plait_disagg.graph.tile import tile


class Joined(nn.Module):
    """The user's rows meet the candidates'."""

    inputs = (Ids("user", "user"), Dense("age", "user"), Ids("item"), Dense("price"))

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 16)

    def forward(self, user, age, item, price):
        both = self.rows(user) * age * self.rows(item)
        return torch.relu(both).sum(1) + price.squeeze(1)


def advised(*, on_cn):
    """Return the advice for a cut behind the tables, or behind what the operators `on_cn` make."""
    program = tile(capture(Joined().eval(), Joined.inputs).program)
    ops = ("plait.lookup", *on_cn)
    halves = split(program, {node.name for node in program.nodes if node.op in ops})
    return advice(halves.cn, candidates=10, ids_per_bag={})


def test_rows_that_outweigh_the_request_are_named():
    """More bytes cross than came: the largest value is named, with the reason."""
    (said,) = advised(on_cn=())
    given, sent = 8 + 4 + 10 * 12, 64 + 4 + 10 * 68
    assert f"{sent} bytes cross for 10 candidates, and the request has {given}" in said
    assert "rows of a table, which are wider than the ids in item" in said


def test_a_users_input_sent_for_every_candidate_is_named_with_the_operator():
    """What repeats the user's values over the candidates before they cross is said, with what it joins. A cut behind
    the sums of the rows, which are fewer bytes than their ids, needs no words."""
    first, *_ = advised(on_cn=("plait.tile", "aten.mul.Tensor"))
    assert "crosses for every candidate (640 bytes)" in first
    assert "the user's user, age" in first
    assert "aten.mul.Tensor" in first
    summed = [f"aten.{op}" for op in ("mul.Tensor", "relu.default", "sum.dim_IntList", "squeeze.dim", "add.Tensor")]
    assert advised(on_cn=("plait.tile", *summed))[1:] == ()
