"""torchrec 1.8.0: features are bags in a `KeyedJaggedTensor`, which may have a number for each id.

The jagged tensor is given its parts by key: torchrec would otherwise read their lengths as numbers to find them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from plait_bench.zoo.adapted import Adapted, Built, Variants, randomised
from plait_disagg.graph.inputs import Bag, Dense, Input

__all__ = ["VARIANTS"]

_USER, _ITEM = {"user": 4_000, "hist": 9_000}, {"item": 9_000, "cate": 200}
_WIDTH, _DENSE = 16, 5


def _jagged(features: dict[str, torch.Tensor]) -> Any:
    jagged = import_module("torchrec.sparse.jagged_tensor")
    parts = {}
    for name in (*_USER, *_ITEM):
        offsets, weights = features[f"{name}_offsets"], features.get(f"{name}_weights")
        parts[name] = jagged.JaggedTensor(features[name], weights, lengths=offsets.diff(), offsets=offsets)
    weighted = all(part.weights_or_none() is not None for part in parts.values())
    return jagged.KeyedJaggedTensor(
        list(parts),
        torch.cat([part.values() for part in parts.values()]),
        torch.cat([part.weights() for part in parts.values()]) if weighted else None,
        torch.cat([part.lengths() for part in parts.values()]),
        length_per_key=[part.values().shape[0] for part in parts.values()],
        jt_dict=parts,
    )


def _collection(pooling: str = "SUM", *, weighted: bool = False) -> Any:
    configs = import_module("torchrec.modules.embedding_configs")
    tables = [
        configs.EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=_WIDTH,
            num_embeddings=rows,
            feature_names=[name],
            pooling=configs.PoolingType[pooling],
        )
        for name, rows in (_USER | _ITEM).items()
    ]
    return import_module("torchrec.modules.embedding_modules").EmbeddingBagCollection(tables, is_weighted=weighted)


def _inputs() -> list[Input]:
    made: list[Input] = [Dense("dense", side="user", shape=(_DENSE,))]
    return [*made, *(Bag(name, side="user") for name in _USER), *(Bag(name) for name in _ITEM)]


def _dlrm(kind: str, pooling: str = "SUM", **options: Any) -> Built:
    models = import_module("torchrec.models.dlrm")
    model = getattr(models, kind)(_collection(pooling), _DENSE, [32, _WIDTH], [32, 1], **options)
    return Adapted(randomised(model), lambda model, given: model(given["dense"], _jagged(given))), _inputs()


def _deepfm() -> Built:
    model = import_module("torchrec.models.deepfm").SimpleDeepFMNN(_DENSE, _collection(), 32, 8)
    return Adapted(randomised(model), lambda model, given: model(given["dense"], _jagged(given))), _inputs()


class _Weighted(nn.Module):
    """A weighted collection, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = _collection(weighted=True)
        self.top = nn.Linear(4 * _WIDTH + _DENSE, 1)

    def forward(self, dense: torch.Tensor, jagged: Any) -> torch.Tensor:
        scores: torch.Tensor = self.top(torch.cat([self.collection(jagged).values(), dense], 1)).squeeze(1)
        return scores


def _weighted() -> Built:
    inputs = [replace(item, weighted=True) if isinstance(item, Bag) else item for item in _inputs()]
    return Adapted(randomised(_Weighted()), lambda model, given: model(given["dense"], _jagged(given))), inputs


VARIANTS: Variants = {
    "torchrec-dlrm": partial(_dlrm, "DLRM"),
    "torchrec-dlrm-mean": partial(_dlrm, "DLRM", "MEAN"),
    "torchrec-dlrm-dcn": partial(_dlrm, "DLRM_DCN", dcn_num_layers=2, dcn_low_rank_dim=8),
    "torchrec-dlrm-projection": partial(
        _dlrm, "DLRM_Projection", interaction_branch1_layer_sizes=[32], interaction_branch2_layer_sizes=[32]
    ),
    "torchrec-deepfm": _deepfm,
    "torchrec-weighted": _weighted,
}
