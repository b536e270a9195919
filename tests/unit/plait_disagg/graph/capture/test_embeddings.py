"""Bags of equal size: weights of every id, and padding that does not count."""

from __future__ import annotations

from functools import partial

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
        nn.init.normal_(self.bag.weight)

    def forward(self, history, times, tags, w):
        return (self.bag(history, per_sample_weights=times) * self.bag(tags, per_sample_weights=w)).sum(1)


class SumPadded(nn.Module):
    """A bag with offsets and padding whose row of the table is not zeros."""

    inputs = (Bag("tags"),)

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 8, mode="sum", padding_idx=0, include_last_offset=True)
        nn.init.normal_(self.bag.weight)

    def forward(self, tags, tags_offsets):
        return self.bag(tags, tags_offsets).sum(1)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(Padded, mode, zeros=zeros) for mode in ("sum", "mean") for zeros in (True, False)),
        Weighted,
        partial(Weighted, padding_idx=2),
        SumPadded,
    ],
)
def test_padding_does_not_count_and_every_other_id_by_its_weight(make):
    """Whatever its row of the table holds; four ids make rows of padding alone."""
    torch.manual_seed(0)
    module = make().eval()
    assert_same_scores(module, module.inputs)


def test_a_largest_of_padded_ids_is_refused():
    """There is no number that never wins."""
    with pytest.raises(UnsupportedOperator, match="padding_idx takes ids out"):
        capture(Padded("max", zeros=False).eval(), Padded.inputs)
