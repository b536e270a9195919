"""The check that runs when a model is packaged: it passes for true halves and says what is wrong with false ones."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.inputs import Dense
from plait_disagg.graph.split import split
from plait_disagg.graph.tile import tile
from plait_disagg.graph.verify import verify_halves
from plait_disagg.tables.reference import SeparateTables


class Rated(nn.Module):
    """Two rates far from 0, whose difference is the score; in double precision where it is `exact`."""

    inputs = (Dense("user", "user", (16,)), Dense("item", "item", (16,)))

    def __init__(self, level, kind=lambda x: x, *, exact=False):
        super().__init__()
        torch.manual_seed(0)
        rates = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(2))
        self.rates = rates.double() if exact else rates
        self.level, self.kind = level, kind

    def forward(self, user, item):
        x = self.kind(torch.cat([user, item], 1)).to(self.rates[0][0].weight.dtype)
        first, second = (rate(x) + self.level for rate in self.rates)
        return (first - second).squeeze(1).float()


def verified_rates(level, kind=lambda x: x, change=lambda halves: halves, *, spoil=dict, bits_promised=False):
    """Compare the halves of `Rated` with its exact scores: the difference is rounding, on every processor."""
    captured = capture(Rated(level, kind).eval(), Rated.inputs)
    halves = change(split(tile(captured.program), ()))
    return verify_halves(
        Rated(level, kind, exact=True).eval(),
        Rated.inputs,
        halves,
        constants=spoil(captured.constants),
        tables=SeparateTables({}),
        bounds={},
        bits_promised=bits_promised,
    )


def test_a_wrong_constant_is_found():
    """A weight that is not the module's shows as outputs that differ, with the size of the difference."""
    name = "rates.1.2.bias"
    found = verified_rates(0.0, spoil=lambda constants: {**constants, name: constants[name] + 0.1})
    assert found
    assert all("outputs differ by 0.1" in text for text in found)


def test_rounding_of_larger_numbers_is_no_fault_of_the_halves_unless_bits_are_promised():
    """Scores of about 1 that are left of numbers of about 1,000 differ by their last places, and rank as well."""
    found = verified_rates(1_000.0)
    assert not found, found
    found = verified_rates(1_000.0, bits_promised=True)
    differences = [re.search(r"bits differ \(by (\S+)\)", text) for text in found]
    assert max(float(text[1]) for text in differences) > 32 * torch.finfo(torch.float32).eps


def test_rounding_that_reorders_candidates_is_called_rounding():
    """Where it is too much of the scores' spread, no row is said to depend on others."""
    found = verified_rates(100_000.0)
    assert found
    assert all("differs by" in text and "at scores near 0" in text for text in found)


def test_a_row_that_depends_on_others_is_told_from_rounding():
    """A softmax over the rows, small as what it adds may be, is neither rounding nor a wrong weight."""

    def over_the_rows(halves):
        nodes = [replace(it, args=(it.args[0], 0)) if "softmax" in it.op else it for it in halves.hn.nodes]
        return replace(halves, hn=replace(halves.hn, nodes=tuple(nodes)))

    assert not verified_rates(0.0, lambda x: torch.softmax(x, 1))
    found = verified_rates(0.0, lambda x: torch.softmax(x, 1), over_the_rows)
    told = [text for text in found if "in another order" in text]
    assert told
    assert all("a row depends on others" in text for text in told)
    assert not any("a row depends" in text for text in set(found) - set(told))
