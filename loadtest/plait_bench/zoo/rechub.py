"""torch-rechub 0.9.0: features by name, each cast with `.long()` before it is looked up."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from plait_bench.zoo.adapted import Adapted, Built, Variants, randomised
from plait_disagg.graph.inputs import Dense, Ids, Input

__all__ = ["VARIANTS"]

_USER, _ITEM = {"user": 4_000, "city": 300}, {"item": 9_000, "cate": 200}
_WIDTH, _HISTORY = 8, 20
_MLP = {"dims": [64, 32], "dropout": 0.2, "activation": "relu"}


def _inputs(*, dense: bool = True, history: bool = False) -> list[Input]:
    made: list[Input] = [Ids(name, side="user") for name in _USER]
    made += [Ids(name, side="item") for name in _ITEM]
    if dense:
        made += [Dense("age", side="user", shape=()), Dense("price", side="item", shape=())]
    if history:
        made += [Ids(f"hist_{name}", side="user", shape=(_HISTORY,)) for name in _ITEM]
    return made


def _sparse(names: dict[str, int]) -> list[Any]:
    features = import_module("torch_rechub.basic.features")
    return [features.SparseFeature(name, vocab_size=rows, embed_dim=_WIDTH) for name, rows in names.items()]


def _dense() -> list[Any]:
    features = import_module("torch_rechub.basic.features")
    return [features.DenseFeature("age"), features.DenseFeature("price")]


def _history(prefix: str = "hist_", pooling: str = "concat") -> list[Any]:
    features = import_module("torch_rechub.basic.features")
    return [
        features.SequenceFeature(
            prefix + name, vocab_size=rows, embed_dim=_WIDTH, pooling=pooling, shared_with=name, padding_idx=0
        )
        for name, rows in _ITEM.items()
    ]


def _called(model: Any, features: dict[str, torch.Tensor]) -> Any:
    return model(features)


def _ranking(name: str, *args: Any, dense: bool = True, **options: Any) -> Built:
    model = getattr(import_module("torch_rechub.models.ranking"), name)(*args, **options)
    return Adapted(randomised(model), _called), _inputs(dense=dense)


def _widedeep() -> Built:
    return _ranking("WideDeep", _dense(), _sparse(_USER | _ITEM), mlp_params=_MLP)


def _deepfm() -> Built:
    return _ranking("DeepFM", _dense(), _sparse(_USER | _ITEM), mlp_params=_MLP)


def _crossed(name: str, **options: Any) -> Built:
    return _ranking(name, _dense() + _sparse(_USER | _ITEM), n_cross_layers=3, mlp_params=_MLP, **options)


def _edcn() -> Built:
    return _ranking("EDCN", _sparse(_USER | _ITEM), n_cross_layers=3, mlp_params=_MLP, dense=False)


def _fibinet() -> Built:
    return _ranking("FiBiNet", _sparse(_USER | _ITEM), mlp_params=_MLP, reduction_ratio=3, dense=False)


def _autoint() -> Built:
    return _ranking("AutoInt", _sparse(_USER | _ITEM), _dense(), mlp_params=_MLP)


def _sequence(name: str, **options: Any) -> Built:
    model = getattr(import_module("torch_rechub.models.ranking"), name)(
        _sparse(_USER), _history(), target_features=_sparse(_ITEM), mlp_params={"dims": [64, 32]}, **options
    )
    return Adapted(randomised(model), _called), _inputs(dense=False, history=True)


def _dien() -> Built:
    model = import_module("torch_rechub.models.ranking.dien").DIEN(
        _sparse(_USER), _history(), _history("neg_"), _sparse(_ITEM), {"dims": [64, 32]}
    )
    negative = [Ids(f"neg_{name}", side="user", shape=(_HISTORY,)) for name in _ITEM]
    made = Adapted(randomised(model), lambda model, features: model(features))
    return made, [*_inputs(dense=False, history=True), *negative]


def _pooled() -> Built:
    model = import_module("torch_rechub.models.ranking").WideDeep(
        _dense(), _sparse(_USER | _ITEM) + _history(pooling="mean"), mlp_params=_MLP
    )
    return Adapted(randomised(model), _called), _inputs(history=True)


def _dssm() -> Built:
    model = import_module("torch_rechub.models.matching").DSSM(
        _sparse(_USER) + _history(pooling="mean"),
        _sparse(_ITEM),
        user_params={"dims": [64, 16]},
        item_params={"dims": [64, 16]},
    )
    return Adapted(randomised(model), _called), _inputs(dense=False, history=True)


def _multi_task(name: str, **options: Any) -> Built:
    types = ["classification", "classification"]
    towers = [{"dims": [16]}, {"dims": [16]}]
    features = _dense() + _sparse(_USER | _ITEM)
    model = getattr(import_module("torch_rechub.models.multi_task"), name)(
        features, types, tower_params_list=towers, **options
    )
    return Adapted(randomised(model), _called), _inputs()


VARIANTS: Variants = {
    "rechub-widedeep": _widedeep,
    "rechub-deepfm": _deepfm,
    "rechub-dcn": partial(_crossed, "DCN"),
    "rechub-dcnv2": partial(_crossed, "DCNv2"),
    "rechub-edcn": _edcn,
    "rechub-fibinet": _fibinet,
    "rechub-autoint": _autoint,
    "rechub-din": partial(_sequence, "DIN", attention_mlp_params={"dims": [32, 16]}),
    "rechub-bst": partial(_sequence, "BST", nhead=2),
    "rechub-dien": _dien,
    "rechub-pooled": _pooled,
    "rechub-dssm": _dssm,
    "rechub-mmoe": partial(_multi_task, "MMOE", n_expert=4, expert_params={"dims": [16]}),
    "rechub-sharedbottom": partial(_multi_task, "SharedBottom", bottom_params={"dims": [32]}),
}
