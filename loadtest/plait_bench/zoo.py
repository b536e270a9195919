"""Models of other libraries, as their users have them: does the cutter take them, and how much crosses?

The libraries are installed beside nothing else, without their dependencies, in a folder of the cache; torch and numpy
stay those of this environment. `python -m plait_bench.zoo [VARIANT ...]`, run where the libraries are, packages every
model, or those named, and compares it; it prints JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml
from torch import nn

from plait_bench.benchmark import Reading, Say, Workload, cache_folder, readings, selected
from plait_bench.commands import run_command
from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.errors import GraphError
from plait_disagg.graph.inputs import Bag, Dense, Ids, Input
from plait_disagg.graph.sample_inputs import collate, sample
from plait_disagg.graph.verify import module_outputs
from plait_disagg.package.manifest import Manifest, PackageError
from plait_disagg.package.read import open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.protocols import DenseHalf, SparseHalf
from plait_disagg.values import RankRequest

LIBRARIES = ("deepctr-torch==0.3.0", "torch-rechub==0.9.0", "recbole==1.2.1", "torchrec==1.8.0")
_NEEDED = (
    "absl-py==2.5.1", "colorama==0.4.6", "colorlog==6.12.0", "fbgemm-gpu-cpu==1.8.0", "lightning-utilities==0.15.3",
    "mypy-extensions==1.2.0", "orjson==3.13.0", "pandas==2.2.3", "pyre-extensions==0.0.32",
    "python-dateutil==2.9.0.post0", "pytz==2026.6", "pyvers==0.2.3", "tensorboard==2.21.0", "tensordict==0.15.3",
    "texttable==1.7.2", "thop==0.1.1.post2209072238", "torchmetrics==1.0.3", "typing-inspect==0.9.0", "tzdata==2026.6",
)  # fmt: skip
"""What the libraries import on the way to their models, and this environment does not have."""

FOLDER = "zoo-2"
_PIP_S, _JUDGE_S = 600.0, 1_800.0
_CANDIDATES, _REQUESTS = 100, 100
_ALIKE = 1e-3
"""The standard deviation of scores from which on a wrong one would show."""

Built: TypeAlias = tuple[nn.Module, Sequence[Input]]
Variants: TypeAlias = dict[str, Callable[[], Built]]

# ---- deepctr-torch: every model reads one packed float matrix, a column for each id ---------------------------------

_HISTORY = 20
_CTR_USER, _CTR_ITEM = {"user": 4_000, "gender": 3, "city": 300}, {"item_id": 9_000, "cate_id": 200, "brand": 500}


def _deepctr(name: str, form: str = "plain") -> Built:
    """`form`: plain (wide and deep columns), deep (one list of columns), sparse (no numbers), or with a history."""
    lib, models = import_module("deepctr_torch.inputs"), import_module("deepctr_torch.models")
    columns = [lib.SparseFeat(key, rows, embedding_dim=8) for key, rows in {**_CTR_USER, **_CTR_ITEM}.items()]
    inputs: list[Input] = [
        *(Ids(key, side="user") for key in _CTR_USER), *(Ids(key, side="item") for key in _CTR_ITEM)
    ]  # fmt: skip
    if form != "sparse":
        columns += [lib.DenseFeat("age", 1), lib.DenseFeat("price", 1)]
        inputs += [Dense("age", side="user"), Dense("price", side="item")]
    if form == "history":
        for key in ("item_id", "cate_id"):
            inner = lib.SparseFeat(f"hist_{key}", _CTR_ITEM[key], embedding_dim=8, embedding_name=key)
            columns.append(lib.VarLenSparseFeat(inner, maxlen=_HISTORY, length_name="seq_length"))
            inputs.append(Ids(f"hist_{key}", side="user", shape=(_HISTORY,)))
        inputs.append(Ids("seq_length", side="user", max=_HISTORY))
    second = {"plain": [columns], "sparse": [columns], "history": [["item_id", "cate_id"]], "deep": []}[form]
    return Adapted(randomised(getattr(models, name)(columns, *second)), _packed), inputs


def _packed(model: Any, features: dict[str, torch.Tensor]) -> Any:
    columns = [features[name].float().reshape(features[name].shape[0], -1) for name in model.feature_index]
    return model(torch.cat(columns, 1))


# ---- torch-rechub: features by name, each cast with `.long()` before it is looked up --------------------------------

_USER, _ITEM = {"user": 4_000, "city": 300}, {"item": 9_000, "cate": 200}
_MLP = {"dims": [64, 32], "dropout": 0.2, "activation": "relu"}


def _rechub(kind: str, name: str, form: str, **options: Any) -> Built:
    """`form`: the lists of features that the constructor takes, in its order: d(ense), s(parse), of the u(ser) or the
    t(arget), h(istory), p(ooled history), n(egative history)."""
    lib = import_module("torch_rechub.basic.features")

    def sparse(names: dict[str, int]) -> list[Any]:
        return [lib.SparseFeature(key, vocab_size=rows, embed_dim=8) for key, rows in names.items()]

    def history(prefix: str, pooling: str) -> list[Any]:
        given = {"embed_dim": 8, "pooling": pooling, "padding_idx": 0}
        return [
            lib.SequenceFeature(prefix + key, vocab_size=rows, shared_with=key, **given) for key, rows in _ITEM.items()
        ]

    makers: dict[str, Callable[[], list[Any]]] = {
        "d": lambda: [lib.DenseFeature("age"), lib.DenseFeature("price")],
        "s": lambda: sparse(_USER | _ITEM),
        "u": lambda: sparse(_USER),
        "t": lambda: sparse(_ITEM),
        "h": lambda: history("hist_", "concat"),
        "p": lambda: history("hist_", "mean"),
        "n": lambda: history("neg_", "concat"),
    }
    features = [[each for letter in part for each in makers[letter]()] for part in form.split()]
    model = getattr(import_module(f"torch_rechub.models.{kind}"), name)(*features, **options)
    inputs: list[Input] = [*(Ids(key, side="user") for key in _USER), *(Ids(key, side="item") for key in _ITEM)]
    if "d" in form:
        inputs += [Dense("age", side="user", shape=()), Dense("price", side="item", shape=())]
    for letters, prefix in (("hp", "hist_"), ("n", "neg_")):
        if set(letters) & set(form):
            inputs += [Ids(prefix + key, side="user", shape=(_HISTORY,)) for key in _ITEM]
    return Adapted(randomised(model), lambda model, given: model(given)), inputs


# ---- recbole: `predict` reads an interaction; configuration and data set are replaced by plain answers --------------

_BOLE_USER, _BOLE_ITEM = {"user_id": 4_000, "city": 300}, {"item_id": 9_000, "cate": 200}
_COMMON = {
    "USER_ID_FIELD": "user_id", "ITEM_ID_FIELD": "item_id", "LABEL_FIELD": "label", "NEG_PREFIX": "neg_",
    "LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": "item_length", "MAX_ITEM_LIST_LENGTH": _HISTORY,
    "device": torch.device("cpu"), "numerical_features": ["price", "age"],
}  # fmt: skip


class _Config(dict[str, Any]):
    """Configuration as recbole reads it: what is not set is None."""

    def __missing__(self, key: str) -> None:
        return None


class _Dataset:
    """The few facts that recbole's models ask of their data."""

    user_num, item_num = _BOLE_USER["user_id"], _BOLE_ITEM["item_id"]

    def __init__(self) -> None:
        kinds, ids = import_module("recbole.utils").FeatureType, (*_BOLE_USER, *_BOLE_ITEM)
        self.field2type = dict.fromkeys(ids, kinds.TOKEN) | dict.fromkeys(("age", "price"), kinds.FLOAT)

    def num(self, field: str) -> int:
        """Return the number of values of a field."""
        return {**_BOLE_USER, **_BOLE_ITEM}.get(field, 1)

    def fields(self, source: Any = None) -> list[str]:
        """Return the names of all fields."""
        return list(self.field2type)


def _recbole(kind: str, name: str) -> Built:
    library = Path(str(import_module("recbole").__file__)).parent
    loaded: dict[str, Any] = yaml.safe_load((library / "properties" / "model" / f"{name}.yaml").read_text())
    loaded |= {key: float(loaded[key]) for key in ("layer_norm_eps",) if key in loaded}  # YAML 1.1 reads 1e-12 as text
    module = import_module(f"recbole.model.{kind}_recommender.{name.lower()}")
    model = randomised(getattr(module, name)(_Config({**_COMMON, **loaded}), _Dataset()))
    if kind == "context_aware":
        inputs: list[Input] = [Ids(key, side="user") for key in _BOLE_USER]
        inputs += [Ids(key, side="item") for key in _BOLE_ITEM]
        inputs += [Dense("age", side="user", shape=()), Dense("price", side="item", shape=())]
    else:
        inputs = [
            Ids("item_id_list", side="user", shape=(_HISTORY,)),
            Ids("item_length", side="user", min=1, max=_HISTORY),
            Ids("item_id", side="item"),
            *([Ids("user_id", side="user")] if name == "Caser" else []),
        ]
    return Adapted(model, _predicted), inputs


def _predicted(model: Any, features: dict[str, torch.Tensor]) -> Any:
    for name in getattr(model, "float_field_names", ()):  # recbole's numbers come with the index of their field's row
        features[name] = torch.stack([features[name], torch.zeros_like(features[name])], 1)
    return model.predict(features)


# ---- torchrec: features are bags in a `KeyedJaggedTensor`, which may have a number for each id ----------------------

_JAGGED = {"user": 4_000, "hist": 9_000, "item": 9_000, "cate": 200}
_WIDTH, _DENSE = 16, 5


def _jagged(features: dict[str, torch.Tensor]) -> Any:
    """Return the tensor with its parts by key: torchrec would otherwise read their lengths as numbers to find them."""
    jagged = import_module("torchrec.sparse.jagged_tensor")
    parts = {}
    for name in _JAGGED:
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
            name=f"t_{name}", embedding_dim=_WIDTH, num_embeddings=rows, feature_names=[name],
            pooling=configs.PoolingType[pooling],
        )
        for name, rows in _JAGGED.items()
    ]  # fmt: skip
    return import_module("torchrec.modules.embedding_modules").EmbeddingBagCollection(tables, is_weighted=weighted)


class _Weighted(nn.Module):
    """A weighted collection, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.collection = _collection(weighted=True)
        self.top = nn.Linear(4 * _WIDTH + _DENSE, 1)

    def forward(self, dense: torch.Tensor, jagged: Any) -> torch.Tensor:
        scores: torch.Tensor = self.top(torch.cat([self.collection(jagged).values(), dense], 1)).squeeze(1)
        return scores


def _torchrec(kind: str, pooling: str = "SUM", **options: Any) -> Built:
    bags = [Bag(name, side="user" if name in ("user", "hist") else "item") for name in _JAGGED]
    if kind == "weighted":
        model: nn.Module = _Weighted()
        bags = [replace(bag, weighted=True) for bag in bags]
    elif kind == "deepfm":
        model = import_module("torchrec.models.deepfm").SimpleDeepFMNN(_DENSE, _collection(), 32, 8)
    else:
        models = import_module("torchrec.models.dlrm")
        model = getattr(models, kind)(_collection(pooling), _DENSE, [32, _WIDTH], [32, 1], **options)
    inputs: list[Input] = [Dense("dense", side="user", shape=(_DENSE,)), *bags]
    return Adapted(randomised(model), lambda model, given: model(given["dense"], _jagged(given))), inputs


# ---- all of them ----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A library's model, called by `call(model, features)`; `features` are the declared inputs by name."""

    def __init__(self, model: nn.Module, call: Callable[[Any, dict[str, torch.Tensor]], Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.eval()

    def forward(self, **features: torch.Tensor) -> Any:
        """Return what the model makes of the features."""
        return self.call(self.model, features)


def randomised(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode, with parameters and statistics large enough that wrong scores would show."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and tensor.dim() > 0:
                drawn = torch.randn(tensor.shape, generator=generator) * (0.5 if tensor.dim() == 1 else 0.15)
                tensor.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
    return model.eval()


def _variants() -> Variants:
    found: Variants = {}
    for form, names in {
        "plain": "DeepFM WDL xDeepFM DCN DCNMix AutoInt NFM FiBiNET IFM DIFM AFN MLR",
        "sparse": "CCPM AFM ONN",
        "deep": "PNN ESMM MMOE PLE SharedBottom",
        "history": "DIN DIEN",
    }.items():
        found |= {f"deepctr-{name.lower()}": partial(_deepctr, name, form) for name in names.split()}
    ranking, crossed = partial(_rechub, "ranking", mlp_params=_MLP), {"n_cross_layers": 3}
    sequence = partial(_rechub, "ranking", form="u h t", mlp_params={"dims": [64, 32]})
    tasks = {"task_types": ["classification"] * 2, "tower_params_list": [{"dims": [16]}] * 2}
    towers = {"user_params": {"dims": [64, 16]}, "item_params": {"dims": [64, 16]}}
    found |= {
        "rechub-widedeep": partial(ranking, "WideDeep", form="d s"),
        "rechub-deepfm": partial(ranking, "DeepFM", form="d s"),
        "rechub-dcn": partial(ranking, "DCN", form="ds", **crossed),
        "rechub-dcnv2": partial(ranking, "DCNv2", form="ds", **crossed),
        "rechub-edcn": partial(ranking, "EDCN", form="s", **crossed),
        "rechub-fibinet": partial(ranking, "FiBiNet", form="s", reduction_ratio=3),
        "rechub-autoint": partial(ranking, "AutoInt", form="s d"),
        "rechub-din": partial(sequence, "DIN", attention_mlp_params={"dims": [32, 16]}),
        "rechub-bst": partial(sequence, "BST", nhead=2),
        "rechub-dien": partial(_rechub, "ranking.dien", "DIEN", "u h n t", mlp_params={"dims": [64, 32]}),
        "rechub-pooled": partial(ranking, "WideDeep", form="d sp"),
        "rechub-dssm": partial(_rechub, "matching", "DSSM", "up t", **towers),
        "rechub-mmoe": partial(_rechub, "multi_task", "MMOE", "ds", **tasks, n_expert=4, expert_params={"dims": [16]}),
        "rechub-sharedbottom": partial(
            _rechub, "multi_task", "SharedBottom", "ds", **tasks, bottom_params={"dims": [32]}
        ),
    }
    for kind, names in {
        "context_aware": "DeepFM AutoInt xDeepFM FM PNN", "sequential": "SASRec GRU4Rec STAMP NARM Caser"
    }.items():  # fmt: skip
        found |= {f"recbole-{name.lower()}": partial(_recbole, kind, name) for name in names.split()}
    branches: dict[str, Any] = {f"interaction_branch{number}_layer_sizes": [32] for number in (1, 2)}
    return found | {
        "torchrec-dlrm": partial(_torchrec, "DLRM"),
        "torchrec-dlrm-mean": partial(_torchrec, "DLRM", "MEAN"),
        "torchrec-dlrm-dcn": partial(_torchrec, "DLRM_DCN", dcn_num_layers=2, dcn_low_rank_dim=8),
        "torchrec-dlrm-projection": partial(_torchrec, "DLRM_Projection", **branches),
        "torchrec-deepfm": partial(_torchrec, "deepfm"),
        "torchrec-weighted": partial(_torchrec, "weighted"),
    }


def judged(name: str, build: Callable[[], Built]) -> dict[str, Any]:
    """Return the facts about one variant: bytes, seconds, and the max difference of scores; or why it is refused."""
    torch.manual_seed(0)
    module, inputs = build()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        started_s = time.perf_counter()
        try:
            write_package(folder, module, inputs, name="model", options=PackageOptions(candidates=_CANDIDATES))
        except (GraphError, PackageError) as error:
            return {"variant": name, "refused": str(error)}
        taken_s = time.perf_counter() - started_s
        package = open_package(folder)
        halves = package.sparse(), package.dense()
        compared = [_difference(module, package.manifest, *halves, seed) for seed in range(_REQUESTS)]
    spread = float(torch.cat([scores for _, scores in compared]).std())
    if not spread > _ALIKE:
        return {"variant": name, "refused": f"its scores are all alike (spread {spread:.1g}): nothing was compared"}
    sizes = value_bytes(package.cn, candidates=_CANDIDATES, ids_per_bag={})
    return {
        "variant": name,
        "crossing_bytes": sum(sizes[ref.name] for _, ref in package.cn.outputs),
        "package_s": taken_s,
        "millionths": max(difference for difference, _ in compared) * 1e6,
    }


def _difference(
    module: nn.Module, manifest: Manifest, sparse: SparseHalf, dense: DenseHalf, seed: int
) -> tuple[float, torch.Tensor]:
    """Return the max difference of any score of one request, of 2 to 101 candidates, and the module's scores."""
    inputs, candidates = manifest.inputs, 2 + seed
    tensors = sample(inputs, manifest.bounds, candidates=candidates, seed=seed)
    wanted = module_outputs(module, inputs, collate(inputs, [tensors], [candidates]))
    request = RankRequest(request_id="", model="model", candidates=candidates, tensors=tensors)
    got = dense.run(sparse.run([request]), [candidates])
    difference = max(float((one - got[name]).abs().max()) for name, one in wanted.items())
    return difference, torch.cat([score.reshape(-1) for score in wanted.values()])


def install(folder: Path, say: Say) -> None:
    """Install the libraries into a folder, without their dependencies, unless they are there. Raises `BenchError`."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing {', '.join(LIBRARIES)} into {folder}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
    run_command([*command, str(folder), *LIBRARIES, *_NEEDED], limit_s=_PIP_S)
    (folder / "complete").touch()


def judge(folder: Path, variants: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """Return the facts about all variants, or about those named, with the libraries of `folder`. Raises
    `BenchError`."""
    paths = [*sys.path, str(folder)]  # behind: torch and numpy stay ours
    command = [sys.executable, "-m", __name__, *variants]
    made = run_command(command, environ={"PYTHONPATH": os.pathsep.join(paths)}, limit_s=_JUDGE_S)
    return [json.loads(line) for line in made.splitlines()]


class Zoo(Workload):
    """For each variant: bytes that cross for 100 candidates, seconds to package it, and the max difference of a score;
    `refused` is 1 for those that are not taken."""

    name = "zoo"
    systems = ("plait",)
    most_rounds = 1
    metrics: Mapping[str, str] = {
        "crossing_bytes": "bytes", "package_s": "s", "millionths": "1e-6 of a score", "refused": "models",
    }  # fmt: skip
    untimed = metrics.keys() - {"package_s"}

    def prepare(self, say: Say) -> None:
        """Install the libraries, unless they are there."""
        self._folder, self._say = cache_folder() / FOLDER, say
        install(self._folder, say)

    def take(self, system: str, number: int) -> list[Reading]:
        """Package and compare all variants."""
        return [reading for found in judge(self._folder) for reading in self._readings(found)]

    def _readings(self, found: Mapping[str, Any]) -> list[Reading]:
        if "refused" in found:
            self._say(f"{found['variant']}: {found['refused']}")
        values = {name: found[name] for name in self.metrics if name != "refused" and name in found}
        return readings({**values, "refused": "refused" in found}, workload=found["variant"])


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark. Raises `BenchError` for an unknown workload."""
    return selected([Zoo()], only)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for variant, builder in _variants().items():
        if not sys.argv[1:] or variant in sys.argv[1:]:
            with contextlib.redirect_stdout(sys.stderr):
                facts = judged(variant, builder)
            print(json.dumps(facts), flush=True)
