"""Named configurations: the published shapes, with the facts and their sources beside each; and random requests for
them, with ids as skewed as real ones.

Which features are user-side is not published for any of them. We take every fourth table as item-side and the
others, with the dense features, as user-side: long multi-hot features are mostly histories of users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from plait_disagg.graph.inputs import Dense, Ids, Input
from plait_disagg.graph.sample_inputs import Draw, sample
from plait_disagg.models.features import Dcn, Dlrm, TwoTower
from plait_disagg.models.history import Din, Hstu
from plait_disagg.models.layers import Sparse
from plait_disagg.values import RankRequest

# fmt: off
# facebookresearch/dlrm, Criteo Kaggle Display Advertising Challenge: distinct values of the 26 categorical features.
_KAGGLE_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572
)
# mlcommons/training, recommendation_v2/torchrec_dlrm: num_embeddings_per_feature and multi_hot_sizes.
_MLPERF_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4,
    976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36
)
_MLPERF_HOT = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1
)
# fmt: on

_SCRAMBLE = 2_654_435_761
"""A prime (Knuth's multiplicative hash) that spreads the popular ids over the table; products stay below 2**63 for
up to 2**31 rows."""

_Made = tuple[Callable[[], nn.Module], tuple[Input, ...], Mapping[str, int]]
"""A factory of the module, its inputs, and the number of ids in a typical bag by input."""

Config = Callable[[float], _Made]
"""Makes one for a scale of the tables' rows."""


def build(name: str, rows_scale: float = 1.0, seed: int = 0) -> tuple[nn.Module, tuple[Input, ...]]:
    """Return a configuration's module in evaluation mode, and its inputs.

    `rows_scale` multiplies the rows of all tables (at least 2). The same seed gives the same weights. Raises
    KeyError for an unknown name.
    """
    make, inputs, _ = CONFIGS[name](rows_scale)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make()
    return module.eval(), inputs


def ids_per_bag(name: str) -> Mapping[str, int]:
    """Return the number of ids in a typical row, by the name of every bag input."""
    _, _, hot = CONFIGS[name](1.0)
    return hot


def _features(rows: Sequence[int], hot: Sequence[int], scale: float, *, bag: bool = True) -> tuple[Sparse, ...]:
    return tuple(
        Sparse(
            name=f"c{index}", rows=_scaled(count, scale), side="item" if index % 4 == 3 else "user", hot=ids, bag=bag
        )
        for index, (count, ids) in enumerate(zip(rows, hot, strict=True))
    )


def _scaled(rows: int, scale: float) -> int:
    return max(2, round(rows * scale))


def _pooled(make: Callable[[], nn.Module], features: Sequence[Sparse], *dense: Dense) -> _Made:
    """Return the configuration of a model over these features and dense inputs."""
    hot = {feature.name: feature.hot for feature in features if feature.bag}
    return make, (*dense, *(feature.input for feature in features)), hot


def _deeprecsys(tables: int, rows: int, *, dim: int, hot: int, bottom: Sequence[int], top: Sequence[int]) -> Config:
    """Build RM1-RM3 of DeepRecSys (Gupta et al., ISCA'20; harvard-acc/DeepRecSys, models/configs): DLRM, interaction
    cat."""

    def config(scale: float) -> _Made:
        features = _features([rows] * tables, [hot] * tables, scale)
        dense = Dense("dense", "user", (bottom[0],))
        return _pooled(lambda: Dlrm(features, dim=dim, bottom=bottom, top=top, interaction="cat"), features, dense)

    return config


def _criteo_kaggle(scale: float) -> _Made:
    """Build the DLRM of facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh: one id per feature, interaction dot."""
    features = _features(_KAGGLE_ROWS, [1] * len(_KAGGLE_ROWS), scale, bag=False)

    def make() -> nn.Module:
        return Dlrm(features, dim=16, bottom=(13, 512, 256, 64, 16), top=(512, 256, 1), interaction="dot")

    return _pooled(make, features, Dense("dense", "user", (13,)))


def _mlperf_dcnv2(scale: float) -> _Made:
    """Build dlrm-v2 of mlcommons/inference: multi-hot Criteo 1TB, DCNv2 with 3 low-rank layers of 512. 97.36 GiB at
    scale 1."""
    features = _features(_MLPERF_ROWS, _MLPERF_HOT, scale)

    def make() -> nn.Module:
        over = (1024, 1024, 512, 256, 1)
        return Dcn(features, dim=128, bottom=(13, 512, 256, 128), over=over, layers=3, rank=512)

    return _pooled(make, features, Dense("dense", "user", (13,)))


def _two_tower(scale: float) -> _Made:
    """Build a retrieval model of our own design: 1 M users and items, a history and tags, towers 256-128-64."""
    features = (
        Sparse(name="user", rows=_scaled(1_000_000, scale), side="user", bag=False),
        Sparse(name="history", rows=_scaled(1_000_000, scale), side="user", hot=50),
        Sparse(name="country", rows=_scaled(200, scale), side="user", bag=False),
        Sparse(name="item", rows=_scaled(1_000_000, scale), side="item", bag=False),
        Sparse(name="tags", rows=_scaled(10_000, scale), side="item", hot=5),
    )

    def make() -> nn.Module:
        return TwoTower(features, dim=64, user_dense=8, item_dense=8, tower=(256, 128, 64))

    return _pooled(make, features, Dense("user_dense", "user", (8,)), Dense("item_dense", "item", (8,)))


def _din(scale: float) -> _Made:
    """Build DIN with the tables of DeepRecSys (10 M, 0.1 M and 1 M rows of 32) and a history of 100, which is our
    choice."""
    inputs: tuple[Input, ...] = (
        Ids("user", "user"),
        Ids("history", "user", (100,)),
        Ids("history_category", "user", (100,)),
        Ids("item", "item"),
        Ids("category", "item"),
    )
    rows = (_scaled(10_000_000, scale), _scaled(100_000, scale), _scaled(1_000_000, scale))
    return lambda: Din(rows=rows, dim=32), inputs, {}


def _hstu(scale: float) -> _Made:
    """Build a small model of the shape of DLRMv3 (meta-recsys/generative-recommenders, `dlrm_v3`: 512 wide, history
    1,024, 10 M items): two layers of 128, a history of 200, 1 M items and as many categories as there, 128."""
    inputs: tuple[Input, ...] = (
        Ids("history", "user", (200,)),
        Ids("history_category", "user", (200,)),
        Ids("item", "item"),
        Ids("category", "item"),
    )
    rows = (_scaled(1_000_000, scale), 128)
    return lambda: Hstu(rows=rows, dim=128, layers=2, heads=4), inputs, {}


CONFIGS: Mapping[str, Config] = MappingProxyType(
    {
        "rm1": _deeprecsys(8, 4_000_000, dim=32, hot=80, bottom=(128, 64, 32), top=(256, 64, 1)),
        "rm2": _deeprecsys(32, 500_000, dim=64, hot=120, bottom=(256, 128, 64), top=(128, 64, 1)),
        "rm3": _deeprecsys(10, 2_000_000, dim=32, hot=20, bottom=(2560, 1024, 256, 32), top=(512, 256, 1)),
        "criteo-kaggle": _criteo_kaggle,
        "mlperf-dcnv2": _mlperf_dcnv2,
        "two-tower": _two_tower,
        "din": _din,
        "hstu": _hstu,
    }
)
"""Every named configuration."""


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
