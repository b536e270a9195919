"""The named configurations have the published shapes; requests are seeded and as skewed as they say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from plait_disagg.graph.inputs import OFFSETS, check_inputs
from plait_disagg.messages.check import check_request
from plait_disagg.models.configs import CONFIGS, build, ids_per_bag, random_request, zipf
from plait_disagg.models.layers import filled
from plait_disagg.values import ModelCard


@pytest.mark.parametrize(
    ("name", "tables", "dim", "ids", "mlps"),
    [
        # facts of DeepRecSys' configurations: ids per sample 640, 3,840, 200
        ("rm1", 8, 32, 640, [(128, 64, 32), (288, 256, 64, 1)]),
        ("rm2", 32, 64, 3840, [(256, 128, 64), (2112, 128, 64, 1)]),
        ("rm3", 10, 32, 200, [(2560, 1024, 256, 32), (352, 512, 256, 1)]),
        ("mlperf-dcnv2", 26, 128, 214, []),
        ("criteo-kaggle", 26, 16, 0, [(13, 512, 256, 64, 16), (16 + 27 * 26 // 2, 512, 256, 1)]),
    ],
)
def test_shapes_are_the_published_ones(name, tables, dim, ids, mlps):
    """Tables, width, ids of a sample, and the parameters of the dense part: those of its layers, by their widths."""
    module, inputs = build(name, rows_scale=1e-6)
    check_inputs(inputs)
    assert {table.weight.shape[1] for table in module.tables.values()} == {dim}
    assert len(module.tables) == tables
    assert sum(ids_per_bag(name).values()) == ids
    dense = sum(p.numel() for key, p in module.named_parameters() if not key.startswith("tables."))
    if name == "mlperf-dcnv2":
        assert dense == pytest.approx(16.04e6, rel=0.002)
    assert not mlps or dense == sum(width * (before + 1) for mlp in mlps for before, width in pairwise(mlp))


def test_a_seed_gives_the_same_weights_and_leaves_the_global_generator_alone():
    """Two builds are equal, another seed differs, and torch's own stream goes on as if nothing had happened."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first, _ = build("two-tower", rows_scale=1e-5, seed=4)
    assert torch.equal(torch.rand(1), expected)
    again, _ = build("two-tower", rows_scale=1e-5, seed=4)
    other, _ = build("two-tower", rows_scale=1e-5, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.tables["item"].weight, other.tables["item"].weight)
    assert not first.training


def test_a_large_table_repeats_its_first_block():
    """Filling costs a copy: rows repeat every 65,536, within +-1/sqrt(rows)."""
    weight = filled(150_000, 2, seed=0)
    assert torch.equal(weight[:1000], weight[65_536:66_536])
    assert float(weight.abs().max()) <= 150_000**-0.5


@pytest.mark.parametrize(
    ("alpha", "hottest_percent", "share"), [(0.8, 1, 0.36), (0.9, 10, 0.73), (1.05, 1, 0.75), (1.2, 1, 0.91)]
)
def test_ids_are_as_skewed_as_zipf(alpha, hottest_percent, share):
    """Share of the hottest rows of a million, as facts about Zipf say (one in 10^6 runs would miss by chance)."""
    ids = zipf(alpha)(100_000, 1_000_000, torch.Generator().manual_seed(2))
    assert ids.min() >= 0
    assert ids.max() < 1_000_000
    hot = set((torch.arange(10_000 * hottest_percent) * 2_654_435_761 % 1_000_000).tolist())
    seen = sum(value in hot for value in ids.tolist()) / len(ids)
    assert seen == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_requests_have_the_declared_tensors(name):
    """User inputs one row, item inputs one per candidate, bags as many ids as configured; seeds repeat."""
    inputs = CONFIGS[name](1e-5)[1]
    per_bag = ids_per_bag(name)
    request = random_request(inputs, {}, model=name, candidates=5, ids_per_bag=per_bag, seed=3)
    again = random_request(inputs, {}, model=name, candidates=5, ids_per_bag=per_bag, seed=3)
    other = random_request(inputs, {}, model=name, candidates=5, ids_per_bag=per_bag, seed=4)
    check_request(ModelCard(name=name, version="1", inputs=inputs, outputs={}), request.tensors, request_id="r")
    assert all(torch.equal(request.tensors[key], again.tensors[key]) for key in request.tensors)
    assert any(not torch.equal(request.tensors[key], other.tensors[key]) for key in request.tensors)
    for bag, ids in per_bag.items():
        assert request.tensors[bag].numel() == request.tensors[bag + OFFSETS].diff().numel() * ids
