"""recbole 1.2.1: `predict` reads an interaction; configuration and data set are replaced by plain answers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from plait_bench.zoo.adapted import Adapted, Built, Variants, randomised
from plait_disagg.graph.inputs import Dense, Ids, Input

__all__ = ["VARIANTS"]

_USER, _ITEM = {"user_id": 4_000, "city": 300}, {"item_id": 9_000, "cate": 200}
_LENGTH = 20
_COMMON = {
    "USER_ID_FIELD": "user_id",
    "ITEM_ID_FIELD": "item_id",
    "LABEL_FIELD": "label",
    "NEG_PREFIX": "neg_",
    "LIST_SUFFIX": "_list",
    "ITEM_LIST_LENGTH_FIELD": "item_length",
    "MAX_ITEM_LIST_LENGTH": _LENGTH,
    "device": torch.device("cpu"),
    "numerical_features": ["price", "age"],
}


class _Config(dict[str, Any]):
    """Configuration as recbole reads it: what is not set is None."""

    def __missing__(self, key: str) -> None:
        return None


class _Dataset:
    """The few facts that recbole's models ask of their data."""

    user_num, item_num = _USER["user_id"], _ITEM["item_id"]

    def __init__(self, *, dense: bool) -> None:
        kinds = import_module("recbole.utils").FeatureType
        self.dense = ("age", "price") if dense else ()
        self.field2type = dict.fromkeys((*_USER, *_ITEM), kinds.TOKEN) | dict.fromkeys(self.dense, kinds.FLOAT)

    def num(self, field: str) -> int:
        """Return the number of values of a field."""
        return {**_USER, **_ITEM}.get(field, 1)

    def fields(self, source: Any = None) -> list[str]:
        """Return the names of all fields."""
        return list(self.field2type)


def _config(name: str, library: Path, **options: Any) -> _Config:
    found = library / "properties" / "model" / f"{name}.yaml"
    loaded: dict[str, Any] = yaml.safe_load(found.read_text(encoding="utf-8"))
    loaded |= {key: float(loaded[key]) for key in ("layer_norm_eps",) if key in loaded}  # YAML 1.1 reads 1e-12 as text
    return _Config({**_COMMON, **loaded, **options})


def _made(kind: str, name: str, *, dense: bool = True, **options: Any) -> Any:
    library = Path(str(import_module("recbole").__file__)).parent
    module = import_module(f"recbole.model.{kind}.{name.lower()}")
    return getattr(module, name)(_config(name, library, **options), _Dataset(dense=dense))


def _predicted(model: Any, features: dict[str, torch.Tensor]) -> Any:
    for name in getattr(model, "float_field_names", ()):  # recbole's numbers come with the index of their field's row
        features[name] = torch.stack([features[name], torch.zeros_like(features[name])], 1)
    return model.predict(features)


def _context(name: str, *, dense: bool = True, **options: Any) -> Built:
    model = randomised(_made("context_aware_recommender", name, dense=dense, **options))
    inputs: list[Input] = [Ids(field, side="user") for field in _USER]
    inputs += [Ids(field, side="item") for field in _ITEM]
    if dense:
        inputs += [Dense("age", side="user", shape=()), Dense("price", side="item", shape=())]
    return Adapted(model, _predicted), inputs


def _sequential(name: str, **options: Any) -> Built:
    model = randomised(_made("sequential_recommender", name, **options))
    inputs: list[Input] = [
        Ids("item_id_list", side="user", shape=(_LENGTH,)),
        Ids("item_length", side="user", min=1, max=_LENGTH),
        Ids("item_id", side="item"),
    ]
    return Adapted(model, _predicted), [*inputs, *([Ids("user_id", side="user")] if name == "Caser" else [])]


VARIANTS: Variants = {
    "recbole-deepfm": partial(_context, "DeepFM"),
    "recbole-autoint": partial(_context, "AutoInt"),
    "recbole-xdeepfm": partial(_context, "xDeepFM"),
    "recbole-fm": partial(_context, "FM"),
    "recbole-pnn": partial(_context, "PNN"),
    "recbole-sasrec": partial(_sequential, "SASRec"),
    "recbole-gru4rec": partial(_sequential, "GRU4Rec"),
    "recbole-stamp": partial(_sequential, "STAMP"),
    "recbole-narm": partial(_sequential, "NARM"),
    "recbole-caser": partial(_sequential, "Caser"),
}
