"""Bags of equal size: weights of every id, and padding that does not count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import Bag, Dense, Ids
from support.graph_scores import assert_same_scores


class Padded(nn.Module):
    """EmbeddingBag over (rows, k) ids, of which some are padding."""

    inputs = (Ids("history", "user", (6,)), Ids("tags", shape=(3,)))

    def __init__(self, mode, *, zeros):
        super().__init__()
        self.bag = nn.EmbeddingBag(4, 8, mode=mode, padding_idx=1)
        if not zeros:
            nn.init.normal_(self.bag.weight)

    def forward(self, history, tags):
        return (self.bag(history) * self.bag(tags)).sum(1)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_does_not_count(mode, zeros):
    """Sums and means leave it out, whatever its row of the table holds; four ids make rows of padding alone."""
    torch.manual_seed(0)
    assert_same_scores(Padded(mode, zeros=zeros).eval(), Padded.inputs)


def test_a_largest_of_padded_ids_is_refused():
    """There is no number that never wins."""
    with pytest.raises(UnsupportedOperator, match="padding_idx takes ids out"):
        capture(Padded("max", zeros=False).eval(), Padded.inputs)


class Weighted(nn.Module):
    """Every id has a number in the request."""

    inputs = (
        Ids("history", "user", (6,)),
        Dense("times", "user", shape=(6,)),
        Ids("tags", shape=(3,)),
        Dense("w", shape=(3,)),
    )

    def __init__(self, **options):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 8, mode="sum", **options)

    def forward(self, history, times, tags, w):
        return (self.bag(history, per_sample_weights=times) * self.bag(tags, per_sample_weights=w)).sum(1)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}])
def test_every_id_counts_by_its_weight(options):
    """The weights of (rows, k) ids come with the request."""
    torch.manual_seed(0)
    module = Weighted(**options)
    nn.init.normal_(module.bag.weight)
    assert_same_scores(module.eval(), Weighted.inputs)


class SumPadded(nn.Module):
    """A bag with offsets and padding whose row of the table is not zeros."""

    inputs = (Bag("tags"),)

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 8, mode="sum", padding_idx=0, include_last_offset=True)
        nn.init.normal_(self.bag.weight)

    def forward(self, tags, tags_offsets):
        return self.bag(tags, tags_offsets).sum(1)


def test_padding_in_a_sum_over_a_bag_with_offsets_does_not_count():
    """It is multiplied with 0."""
    torch.manual_seed(0)
    assert_same_scores(SumPadded().eval(), SumPadded.inputs)
