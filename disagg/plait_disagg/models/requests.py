"""Random requests for the named configurations, with ids as skewed as real ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from plait_disagg.graph.inputs import Input
from plait_disagg.graph.sample_inputs import Draw, sample
from plait_disagg.values import RankRequest

_SCRAMBLE = 2_654_435_761
"""A prime (Knuth's multiplicative hash) that spreads the popular ids over the table; products stay below 2**63 for
up to 2**31 rows."""


def zipf(alpha: float) -> Draw:
    """Return a function that draws ids, the k-th most popular with probability ~ k ** -alpha.

    It inverts the continuous law; 0 is uniform. Published skews: 1.05 (NVIDIA's embedding cache benchmark) to 1.2
    (HugeCTR's profiler).
    """

    def draw(count: int, rows: int, generator: torch.Generator) -> torch.Tensor:
        u = torch.rand(count, generator=generator, dtype=torch.float64)
        if abs(alpha - 1.0) < 1e-9:
            rank = torch.exp(u * math.log(rows + 1))
        else:
            top = (rows + 1) ** (1.0 - alpha)
            rank = ((top - 1.0) * u + 1.0) ** (1.0 / (1.0 - alpha))
        places = rank.to(torch.int64).clamp_(1, rows) - 1
        return places * _SCRAMBLE % rows

    return draw


def random_request(
    inputs: Sequence[Input],
    bounds: Mapping[str, int],
    *,
    model: str,
    candidates: int,
    ids_per_bag: Mapping[str, int],
    alpha: float = 1.05,
    seed: int = 0,
) -> RankRequest:
    """Draw a request that the model's check accepts, the same for the same seed. `bounds`: see `id_bounds`."""
    tensors = sample(inputs, bounds, candidates=candidates, ids_per_bag=ids_per_bag, seed=seed, draw=zipf(alpha))
    return RankRequest(request_id=f"{model}-{seed}", model=model, candidates=candidates, tensors=tensors)
