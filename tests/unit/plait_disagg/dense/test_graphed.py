"""A dense half as graphs, with a capture that needs no GPU: equal scores however far a batch is filled up."""

from __future__ import annotations

import pytest
import torch

from fakes.graphs import FakeCapture
from plait_disagg.dense.prepared import DenseGraphs
from plait_disagg.graph.execute import compile_program
from plait_disagg.graph.program import USER_OF
from plait_disagg.queue.batch import user_of
from plait_kernels.executors.graphs import GraphMemory
from support.dense import PackagedConfiguration

BATCHES = ((1,), (3,), (7,), (5, 1, 20), (64,), (30, 30, 3), (3,), (7,), (5, 2, 19))


@pytest.fixture(scope="module", params=["two-tower", "din"])
def configuration(request, tmp_path_factory) -> PackagedConfiguration:
    """A packaged one."""
    return PackagedConfiguration(request.param, tmp_path_factory.mktemp("graphed") / request.param)


def make_graphs(configuration: PackagedConfiguration) -> tuple[DenseGraphs, GraphMemory]:
    """Of its dense half, on the CPU."""
    package = configuration.package
    program, memory = compile_program(package.hn, package.constants), GraphMemory(FakeCapture(), budget_bytes=1 << 30)
    return DenseGraphs(program, torch.device("cpu"), memory), memory


def crossing(configuration: PackagedConfiguration, candidates: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """What an HN is given for a batch."""
    requests = configuration.requests(*candidates, seed=seed)
    return {**configuration.package.sparse().run(requests), USER_OF: user_of(candidates)}


def test_scores_are_those_of_the_program(configuration):
    """Eagerly, captured, again where a larger one came, replayed; one user and several; what the last batch left in a
    graph does not show."""
    half, (graphs, memory) = configuration.package.dense(), make_graphs(configuration)
    for seed, candidates in enumerate(BATCHES * 3):
        given = crossing(configuration, candidates, seed)
        wanted = half.run(given, candidates)
        made = graphs.run(given, len(candidates), sum(candidates))
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(made[name], value, rtol=0, atol=1e-5)
    assert memory.graphs == len({(len(batch), (sum(batch) - 1).bit_length()) for batch in BATCHES})


def test_answers_stay_when_the_graph_runs_again(configuration):
    """What was returned is not overwritten by the next batch of its bucket."""
    graphs, _ = make_graphs(configuration)
    batches = [crossing(configuration, (8,), seed) for seed in range(3)]
    first, second, _ = (graphs.run(given, 1, 8) for given in batches)
    kept = {name: value.clone() for name, value in second.items()}
    graphs.run(batches[0], 1, 8)
    for name, value in second.items():
        assert torch.equal(value, kept[name])
        assert not torch.equal(value, first[name])
