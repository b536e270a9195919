"""deepctr-torch 0.3.0: every model reads one packed float matrix, a column for each id."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from plait_bench.zoo.adapted import Adapted, Built, Variants, randomised
from plait_disagg.graph.inputs import Dense, Ids, Input

__all__ = ["VARIANTS"]

_SIDES = {"user": 4_000, "gender": 3, "city": 300}, {"item_id": 9_000, "cate_id": 200, "brand": 500}
_WIDTH, _HISTORY = 8, 20


def _features(lib: Any) -> list[Any]:
    user, item = _SIDES
    sparse = [lib.SparseFeat(name, rows, embedding_dim=_WIDTH) for name, rows in {**user, **item}.items()]
    return [*sparse, lib.DenseFeat("age", 1), lib.DenseFeat("price", 1)]


def _inputs() -> list[Input]:
    user, item = _SIDES
    return [
        *(Ids(name, side="user") for name in user),
        *(Ids(name, side="item") for name in item),
        Dense("age", side="user"),
        Dense("price", side="item"),
    ]


def _packed(model: Any, features: dict[str, torch.Tensor]) -> torch.Tensor:
    columns = [features[name].float().reshape(features[name].shape[0], -1) for name in model.feature_index]
    made: torch.Tensor = model(torch.cat(columns, 1))
    return made


def _plain(name: str, **options: Any) -> Built:
    lib, models = import_module("deepctr_torch.inputs"), import_module("deepctr_torch.models")
    columns = _features(lib)
    return Adapted(randomised(getattr(models, name)(columns, columns, **options)), _packed), _inputs()


def _deep_only(name: str, **options: Any) -> Built:
    lib, models = import_module("deepctr_torch.inputs"), import_module("deepctr_torch.models")
    return Adapted(randomised(getattr(models, name)(_features(lib), **options)), _packed), _inputs()


def _sparse_only(name: str, **options: Any) -> Built:
    lib, models = import_module("deepctr_torch.inputs"), import_module("deepctr_torch.models")
    columns = [column for column in _features(lib) if isinstance(column, lib.SparseFeat)]
    inputs = [item for item in _inputs() if isinstance(item, Ids)]
    return Adapted(randomised(getattr(models, name)(columns, columns, **options)), _packed), inputs


def _with_history(name: str, **options: Any) -> Built:
    lib, models = import_module("deepctr_torch.inputs"), import_module("deepctr_torch.models")
    columns = _features(lib)
    for feature in ("item_id", "cate_id"):
        rows = _SIDES[1][feature]
        inner = lib.SparseFeat(f"hist_{feature}", rows, embedding_dim=_WIDTH, embedding_name=feature)
        columns.append(lib.VarLenSparseFeat(inner, maxlen=_HISTORY, length_name="seq_length"))
    inputs = [
        *_inputs(),
        Ids("hist_item_id", side="user", shape=(_HISTORY,)),
        Ids("hist_cate_id", side="user", shape=(_HISTORY,)),
        Ids("seq_length", side="user", max=_HISTORY),
    ]
    return Adapted(randomised(getattr(models, name)(columns, ["item_id", "cate_id"], **options)), _packed), inputs


def _named(builder: Callable[..., Built], names: str, **options: Any) -> dict[str, Callable[[], Built]]:
    return {f"deepctr-{name.lower()}": partial(builder, name, **options) for name in names.split()}


VARIANTS: Variants = {
    **_named(_plain, "DeepFM WDL xDeepFM DCN DCNMix AutoInt NFM FiBiNET IFM DIFM AFN MLR"),
    **_named(_sparse_only, "CCPM AFM ONN"),
    **_named(_deep_only, "PNN ESMM MMOE PLE SharedBottom"),
    **_named(_with_history, "DIN DIEN"),
}
