"""A dense half as graphs, with a capture that needs no GPU: equal scores however far a batch is filled up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.graphs import FakeCapture
from plait_disagg.dense.graphed import DenseGraphs
from plait_disagg.graph.execute import compile_program
from plait_disagg.graph.program import USER_OF
from plait_disagg.graph.sample_inputs import sample
from plait_disagg.messages.check import check_request
from plait_disagg.models.configs import build, ids_per_bag
from plait_disagg.package import Package, PackageOptions, open_package, write_package
from plait_disagg.queue.batch import user_of
from plait_kernels.executors.graphs import GraphMemory

SCALES = {"rm1": 1e-4, "two-tower": 1e-3, "din": 1e-4}
BATCHES = ((1,), (3,), (7,), (5, 1, 20), (64,), (30, 30, 3), (3,), (7,), (5, 2, 19))


@pytest.fixture(scope="module", params=sorted(SCALES))
def package(request, tmp_path_factory) -> Package:
    """A packaged configuration with few rows."""
    folder: Path = tmp_path_factory.mktemp("graphed") / request.param
    module, inputs = build(request.param, rows_scale=SCALES[request.param])
    hot = {bag: min(ids, 8) for bag, ids in ids_per_bag(request.param).items()}
    write_package(folder, module, inputs, name="m", options=PackageOptions(ids_per_bag=hot))
    return open_package(folder)


def make_graphs(package: Package, capture: FakeCapture) -> DenseGraphs:
    """Of the package's dense half, on the CPU."""
    return DenseGraphs(
        compile_program(package.hn, package.constants), torch.device("cpu"), GraphMemory(capture, budget_bytes=1 << 30)
    )


def crossing(package: Package, candidates: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """What an HN is given for a batch."""
    card, manifest = package.card(), package.manifest
    samples = [
        sample(manifest.inputs, manifest.bounds, candidates=n, seed=seed + at) for at, n in enumerate(candidates)
    ]
    requests = [check_request(card, tensors, request_id=str(at)) for at, tensors in enumerate(samples)]
    given = dict(package.sparse().run(requests))
    return given | {USER_OF: user_of(candidates)}


def test_scores_are_those_of_the_program(package):
    """Eagerly, captured, again where a larger one came, replayed; one user and several; what the last batch left in a
    graph does not show."""
    capture = FakeCapture()
    half, graphs = package.dense(), make_graphs(package, capture)
    for seed, candidates in enumerate(BATCHES * 3):
        given = crossing(package, candidates, seed)
        wanted = half.run(given, candidates)
        made = graphs.run(given, len(candidates), sum(candidates))
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(made[name], value, rtol=0, atol=1e-5)
    assert graphs.graphs == len({(len(batch), (sum(batch) - 1).bit_length()) for batch in BATCHES})


def test_answers_stay_when_the_graph_runs_again(package):
    """What was returned is not overwritten by the next batch of its bucket."""
    graphs = make_graphs(package, FakeCapture())
    batches = [crossing(package, (8,), seed) for seed in range(3)]
    first, second, _ = (graphs.run(given, 1, 8) for given in batches)
    kept = {name: value.clone() for name, value in second.items()}
    graphs.run(batches[0], 1, 8)
    for name, value in second.items():
        assert torch.equal(value, kept[name])
        assert not torch.equal(value, first[name])
