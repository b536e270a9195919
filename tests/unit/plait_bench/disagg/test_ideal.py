"""What a split can be: the bare halves in two processes give the scores of the halves in one."""

from __future__ import annotations

import torch

from plait_bench.disagg.ideal import ideal_split
from plait_disagg.models.configs import random_request
from plait_disagg.package.read import open_package
from plait_serving.ranking.config import STARTER_RANKING_FOLDER


def test_the_bare_halves_give_the_scores_of_the_model() -> None:
    """Batch for batch, one at a time and with several in flight, whose number is as it was asked for."""
    package = open_package(STARTER_RANKING_FOLDER)
    manifest = package.manifest
    requests = [
        random_request(manifest.inputs, manifest.bounds, model="picks", candidates=5, ids_per_bag=3, seed=seed)
        for seed in range(4)
    ]
    batches = [requests[:2], requests[2:]]
    sparse, dense = package.sparse(), package.dense()
    with torch.inference_mode():
        wanted = [list(dense.run(sparse.run(batch), [5, 5]).values()) for batch in batches]
    with ideal_split(package, batches, threads=1, hn_threads=1, slots=2) as split:
        for number in (0, 1, 2):
            for got, output in zip(split.answers(number), wanted[number % 2], strict=True):
                torch.testing.assert_close(got, output)
        assert split.answers_for(0.05) > 0
        for got, output in zip(split.answers(1), wanted[1], strict=True):
            torch.testing.assert_close(got, output)
