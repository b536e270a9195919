"""Dot interactions taken apart: the same scores, and the user's dots once per user."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.factor import factor_linears
from plait_disagg.graph.inputs import Dense
from plait_disagg.graph.interaction import split_interactions
from plait_disagg.graph.program import TILE
from plait_disagg.graph.sample_inputs import collate, sample
from plait_disagg.graph.tile import tile

WIDTH = 4


class Dots(nn.Module):
    """Vectors by input, dots of chosen pairs, then a layer over some vectors and the dots."""

    pairs: torch.Tensor

    def __init__(self, fields: int, pairs: list[int], *, second_reader: bool = False) -> None:
        super().__init__()
        self.second_reader = second_reader
        self.register_buffer("pairs", torch.tensor(pairs))
        self.layer = nn.Linear(2 * WIDTH + len(pairs), 5)
        self.names = [f"v{n}" for n in range(fields)]

    def forward(self, **vectors):
        found = [vectors[name] for name in self.names]
        z = torch.stack(found, dim=1)
        picked = torch.bmm(z, z.transpose(1, 2)).flatten(1)[:, self.pairs]
        made = {"score": self.layer(torch.cat([found[0], picked, found[-1]], dim=1))}
        return {**made, "dots": picked * 2.0} if self.second_reader else made


def programs(sides, pairs, **options):
    """The tiled program and its constants, before and after."""
    torch.manual_seed(len(pairs))
    module = Dots(len(sides), pairs, **options).eval()
    inputs = [Dense(f"v{n}", side, (WIDTH,)) for n, side in enumerate(sides)]
    captured = capture(module, inputs)
    before = tile(captured.program), dict(captured.constants)
    return inputs, before, split_interactions(*before)


def run(inputs, program, constants, candidates=(3, 1, 5)):
    """The outputs for a batch of requests."""
    requests = [sample(inputs, {}, candidates=count, seed=place) for place, count in enumerate(candidates)]
    values = run_reference(program, constants, None, collate(inputs, requests, candidates))
    return {name: values[ref.name] for name, ref in program.outputs}


@settings(max_examples=15)
@given(data=st.data())
def test_scores_stay(data):
    """Whatever vectors are the user's and whatever pairs are picked: in any order, both ways round, with themselves."""
    sides = data.draw(st.lists(st.sampled_from(["user", "item"]), min_size=2, max_size=6).filter(lambda s: "item" in s))
    places = len(sides) ** 2 - 1
    pairs = data.draw(st.lists(st.integers(0, places), min_size=1, max_size=12))
    inputs, before, after = programs(sides, pairs)
    wanted, found = run(inputs, *before), run(inputs, *after)
    torch.testing.assert_close(found["score"], wanted["score"], rtol=1e-5, atol=1e-5)
    factored = run(inputs, *factor_linears(*after))
    torch.testing.assert_close(factored["score"], wanted["score"], rtol=1e-5, atol=1e-5)


def test_the_users_dots_have_a_row_per_user():
    """Three user vectors: their three pairs once per user; the candidate's against all four per candidate. With
    `factor_linears` the user's are never repeated over the candidates, only their share of the layer is."""
    lower = [place for place in range(16) if place // 4 > place % 4]
    _, _, after = programs(["user", "user", "user", "item"], lower)
    program, _ = after
    shapes = {(node.rows, node.shape) for node in program.nodes if node.op == "aten.bmm.default"}
    assert shapes == {("user", (-1, 3, 3)), ("item", (-1, 1, 4))}
    picked = {(node.rows, node.shape) for node in program.nodes if node.op == "aten.index.Tensor"}
    assert picked == {("user", (-1, 3)), ("item", (-1, 3))}
    factored, _ = factor_linears(*after)
    tiled = [node.shape for node in factored.nodes if node.op == TILE]
    assert (-1, 3) not in tiled
    assert (-1, 5) in tiled


@pytest.mark.parametrize(
    ("sides", "pairs", "options"),
    [
        (["item", "item"], [1, 2], {}),
        (["user", "item"], [1, 2], {}),
        (["user", "user", "item"], [1, 2, 5], {"second_reader": True}),
    ],
)
def test_what_gains_nothing_or_is_read_elsewhere_is_left_alone(sides, pairs, options):
    """No pair of the user's, or somebody else who needs the dots in their order."""
    _, (before, _), (after, _) = programs(sides, pairs, **options)
    assert after == before
