"""A linear layer over both sides' features, taken apart."""

from __future__ import annotations

import torch

from plait_disagg.graph.factor import factor_linears
from plait_disagg.graph.program import TILE
from plait_disagg.graph.store import dump_program, load_program
from plait_disagg.graph.tile import tile
from support.graph import model


def test_the_users_columns_are_multiplied_once_per_user():
    """rm1: 224 of the 288 columns of the first top layer are the user's; one tile is left of seven."""
    _, captured = model("rm1")
    program = tile(captured.program)
    factored, constants = factor_linears(program, captured.constants)
    shares = {
        node.name: (node.rows, constants[node.args[1].name].shape[1])
        for node in factored.nodes
        if ":" in node.name and "linear" in node.op
    }
    assert shares == {"linear_2:user": ("user", 224), "linear_2:item": ("item", 64)}
    assert sum(node.op == TILE for node in program.nodes) == 7
    assert sum(node.op == TILE for node in factored.nodes) == 1
    assert "top.0.weight" not in constants
    assert load_program(dump_program(factored)) == factored


def test_a_candidates_vector_is_multiplied_once_not_for_every_step():
    """DIN's unit reads [h, v, h - v, h * v] at each of 100 steps: only h * v stays a product for every step."""
    _, captured = model("din")
    program = tile(captured.program)
    factored, constants = factor_linears(program, captured.constants)
    nodes = {node.name: node for node in factored.nodes}
    assert {name: nodes[f"linear:{name}"].shape for name in ("user", "item", "narrow")} == {
        "user": (-1, 100, 80), "item": (-1, 100, 80), "narrow": (-1, 1, 80),
    }  # fmt: skip
    h, v, difference, product = captured.constants["unit.0.weight"].split(64, dim=1)
    torch.testing.assert_close(constants["linear:user:weight"], h + difference)
    torch.testing.assert_close(constants["linear:narrow:weight"], v - difference)
    assert torch.equal(constants["linear:item:weight"], product)
    assert "sub" not in nodes
