"""What a package may ask for: its halves are refused before they run where they would take the machine's memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.inputs import Bag, Dense
from plait_disagg.graph.program import LOOKUP
from plait_disagg.graph.tile import tile
from plait_disagg.package.manifest import TABLES, PackageError, sha256_of
from plait_disagg.package.memory import check_memory
from plait_disagg.package.read import open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.tables import storage
from support.graph import model
from support.graph_models import Small


class Wide(nn.Module):
    """Half a megabyte for each candidate."""

    inputs = (Dense("age", "user"), Bag("genres", "item"))

    def __init__(self) -> None:
        super().__init__()
        self.genres = nn.EmbeddingBag(12, 8, mode="sum", include_last_offset=True)
        self.top = nn.Linear(8, 1 << 17)

    def forward(self, age: Any, genres: Any, genres_offsets: Any) -> Any:
        return {"scores": torch.relu(self.top(self.genres(genres, genres_offsets))).sum(1) + age.squeeze(1)}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Small`, written once."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("memory") / "small"
    write_package(folder, Small().eval(), Small.inputs, name="small")
    return folder


@pytest.fixture
def folder(packaged: Path, tmp_path: Path) -> Path:
    """A package that a test may spoil."""
    return Path(shutil.copytree(packaged, tmp_path / "small"))


def spoil(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a program and its check sum, as whoever made the package could."""
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data))
    manifest = json.loads((folder / "package.json").read_text())
    manifest["files"][file] = sha256_of(folder / file)
    (folder / "package.json").write_text(json.dumps(manifest))


def node(
    name: str, op: str, args: Sequence[Any], shape: Sequence[int], *, dtype: str = "float32", **kwargs: Any
) -> dict[str, Any]:
    """A node of a stored program."""
    return {"name": name, "op": op, "args": list(args), "kwargs": kwargs, "shape": list(shape), "dtype": dtype,
            "rows": "none"}  # fmt: skip


def rows_of(name: str) -> dict[str, Any]:
    """How many rows a value has."""
    return node(f"{name}:n", "aten.sym_size.int", [{"ref": name}, 0], [], dtype="int")


def ref(name: str) -> dict[str, str]:
    """A reference."""
    return {"ref": name}


N = ref("user_of:n")
ONES, EXPAND, CLONE = "aten.ones.default", "aten.expand.default", "aten.clone.default"

GREEDY = {
    "256 GiB that call themselves small": [node("x", ONES, [[2**36]], [4])],
    "more than a number holds": [node("x", ONES, [[2**40, 2**40]], [2**40, 2**40])],
    "the cube of the candidates": [rows_of("user_of"), node("x", ONES, [[N, N, N]], [-1, 1, 1])],
    "an expanded number, copied": [
        node("a", ONES, [[1]], [1]),
        node("b", EXPAND, [ref("a"), [2**36]], [2**36]),
        node("c", CLONE, [ref("b")], [2**36]),
    ],
    "many of 4 GiB": [node(f"x{i}", ONES, [[2**30]], [2**30]) for i in range(5)]
    + [node("all", "aten.cat.default", [[ref(f"x{i}") for i in range(5)]], [5 * 2**30])],
    "a large value on the way to a small one": [
        node("a", ONES, [[2**18]], [2**18]),
        node("b", "aten.einsum.default", ["i,j,j->", [ref("a"), ref("a"), ref("a")]], []),
        node("c", "aten.repeat.default", [ref("a"), [2**18, 1]], [2**18, 2**18]),
        node("d", "aten.sum.dim_IntList", [ref("c"), [0, 1]], []),
    ],
    "classes": [
        node("a", "aten.zeros.default", [[8]], [8], dtype="int64") | {"kwargs": {"dtype": {"dtype": "int64"}}},
        node("b", "aten.one_hot.default", [ref("a"), 2**36], [8, 2**36], dtype="int64"),
    ],
}


class Allocated(TorchDispatchMode):
    """Counts the bytes of what operators return that has data."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.nbytes += sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")
        return made


@pytest.mark.parametrize(("half", "what"), [("hn.json", "classes"), *(("cn.json", what) for what in GREEDY)])
def test_a_package_that_asks_for_too_much_memory_is_refused_when_it_is_loaded(
    folder: Path, what: str, half: str
) -> None:
    """Finding 12: `aten.ones([2**36])` took 256 GiB with the first request. Finding it out takes no memory."""
    spoil(folder, half, lambda data: data["nodes"].extend(GREEDY[what]))
    package = open_package(folder)
    with Allocated() as allocated, pytest.raises(PackageError, match=rf"{half}: \w+(:n)?: "):
        package.sparse() if half == "cn.json" else package.dense()
    assert allocated.nbytes < 1 << 20


def shrink(data: dict[str, Any]) -> None:
    """Be largest in between, where nobody looks, by becoming smaller with more candidates."""
    sliced = node("b", "aten.slice.Tensor", [ref("a"), 0, N, 9], [-1])
    data["nodes"].extend([rows_of("user_of"), node("a", ONES, [[9]], [9]), sliced])


def widen(data: dict[str, Any]) -> None:
    """Declare an input that is larger in truth than what is given, and so everything after it."""
    next(port for port in data["inputs"] if port["name"] == "age")["shape"] = [-1, 2]


def narrow(data: dict[str, Any]) -> None:
    """Say another width of a row than the table's."""
    next(each for each in data["nodes"] if each["op"] == LOOKUP)["shape"] = [-1, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (shrink, "uses the number of rows as a number"),
        (widen, r"age: the program is not given the float32 \(-1, 2\)"),
        (narrow, "is not the float32"),
    ],
)
def test_a_program_whose_sizes_are_not_what_it_says_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    """Finding 12: a number of rows is a size and nothing else, and what is given and looked up is as it is."""
    spoil(folder, "cn.json", change)
    with pytest.raises(PackageError, match=says):
        open_package(folder).sparse()


def test_a_model_that_could_not_be_loaded_is_not_packaged(tmp_path: Path) -> None:
    """Its maker is told what to change; with fewer candidates it fits."""
    with pytest.raises(PackageError, match=r"largest_candidates=1000000: .* GiB"):
        options = PackageOptions(largest_candidates=1_000_000)
        write_package(tmp_path / "wide", Wide().eval(), Wide.inputs, name="wide", options=options)
    assert list(tmp_path.iterdir()) == []
    write_package(tmp_path / "wide", Wide().eval(), Wide.inputs, name="wide")
    open_package(tmp_path / "wide").dense()


@pytest.mark.parametrize("name", ["small", "zoo", "weighted", "din"])
@pytest.mark.parametrize("exact", [False, True])
def test_what_models_of_all_kinds_need_is_far_below_the_limit(name: str, exact: bool) -> None:
    """Every operator that a captured model has tells its size without data, tiled and as it was captured."""
    _, captured = model(name)
    widths = {table: int(weight.shape[1]) for table, weight in captured.tables.items()}
    check_memory(captured.program, widths=widths, users=4_096, candidates=4_096)
    tiled = tile(captured.program, exact=exact)
    check_memory(tiled, widths=widths, users=1, candidates=10_000)
    with pytest.raises(BadProgram, match="would need"):
        check_memory(tiled, widths=widths, users=1, candidates=10_000, max_bytes=10_000)


def test_the_files_of_a_package_follow_the_umask(tmp_path: Path) -> None:
    """Finding 12: `constants.safetensors` was its owner's alone, so that a server of another user could not start."""
    before = os.umask(0o027)
    try:
        write_package(tmp_path / "p", Small().eval(), Small.inputs, name="p")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "p").iterdir()} == {0o640}


def test_who_publishes_updates_reads_no_tables_ahead(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress checks an update against the tables' header, and does not fill its host's memory with their rows, as a
    worker that looks up does."""
    read: list[Path] = []
    monkeypatch.setattr(storage, "read_ahead", lambda path, _: read.append(path))
    package = open_package(packaged)
    assert package.tables.is_writable
    assert not read
    package.sparse()
    assert read == [packaged / TABLES]
