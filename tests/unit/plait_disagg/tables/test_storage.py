"""Table files: what is written is read, nothing is copied, pages are shared, and broken files are refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from plait_disagg.tables.container import BadTableFile
from plait_disagg.tables.formats import encode_rows
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.storage import open_tables, write_tables
from plait_disagg.tables.values import RowFormat
from support.tables import Weights, make_ask, make_weights

WEIGHTS = make_weights()
MIXED: dict[str, RowFormat] = {"t1": "int8", "t2": "float16", "t3": "int8"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good file of tables in several formats."""
    file = tmp_path / "tables.safetensors"
    write_tables(file, WEIGHTS, formats=MIXED, out_of_range={"t0": "hash"})
    return file


def test_a_file_gives_back_what_was_written(path: Path):
    """Tables, groups, policies and every stored bit, however small the chunks that were written."""
    write_tables(path, WEIGHTS, formats=MIXED, out_of_range={"t0": "hash"}, chunk_bytes=100)
    opened = open_tables(path)
    assert {table.name: (table.rows, table.dim) for table in opened.tables} == {
        name: tuple(weight.shape) for name, weight in WEIGHTS.items()
    }
    assert {table.name: table.out_of_range for table in opened.tables}["t0"] == "hash"
    assert sum(place.table.rows for place in opened.places.values()) == sum(map(len, opened.matrices.values()))
    for name, place in opened.places.items():
        rows = opened.matrices[place.group.name][place.first : place.first + place.table.rows]
        assert torch.equal(rows, encode_rows(WEIGHTS[name], MIXED.get(name, "float32")))
    assert opened.nbytes == sum(matrix.nbytes for matrix in opened.matrices.values())


def test_the_file_is_plain_safetensors(path: Path):
    """Other tools can read it: the safetensors library gives the same tensors."""
    opened = open_tables(path)
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == sorted(opened.matrices)
        assert all(torch.equal(file.get_tensor(name), opened.matrices[name]) for name in opened.matrices)


def test_a_failed_write_leaves_nothing(tmp_path: Path):
    """A table that cannot be stored leaves neither a file nor a part of one, and an older file as it was."""
    file = tmp_path / "tables.safetensors"
    write_tables(file, WEIGHTS)
    before = file.read_bytes()
    with pytest.raises(ValueError, match="table bad"):
        write_tables(file, {**WEIGHTS, "bad": torch.full((2, 2), torch.nan)}, formats="int8")
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tables.safetensors"]


def test_a_large_table_takes_no_room_and_opens_at_once(tmp_path: Path):
    """20 GB of zeros are a few blocks on disk, are mapped without being read, and answer from both ends."""
    file = tmp_path / "tables.safetensors"
    rows, row_bytes = 78_125_000, 64 * 4
    write_tables(file, {"large": torch.zeros(1, 64)})
    rewrite(file, lambda header: header["float32_64"].update(shape=[rows, 64], data_offsets=[0, rows * row_bytes]))
    rewrite(file, said(lambda data: data["tables"][0].update(rows=rows)))
    os.truncate(file, file.stat().st_size + (rows - 1) * row_bytes)
    assert file.stat().st_size > 20e9
    assert file.stat().st_blocks * 512 < 1 << 20
    tables = FusedTables(open_tables(file))
    assert "rr" in mapping_of(file)["VmFlags"], "random reads: each row would bring megabytes with it"
    assert torch.equal(tables.lookup([make_ask("large", "sum", [[0, rows - 1]])])[0], torch.zeros(1, 64))
    assert mapping_of(file)["Rss"] < 32 << 20


def test_a_small_file_is_read_ahead(path: Path):
    """A small file keeps the kernel's read-ahead, which has it in memory after a few lookups."""
    tables = open_tables(path)
    assert "rr" not in mapping_of(path)["VmFlags"]
    assert tables.nbytes < path.stat().st_size


def test_a_larger_file_is_brought_into_memory_if_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a single lookup; and not where it would take more than half of the memory that is available. No page of
    it is this process's own, so all that map the file share them."""
    file = tmp_path / "tables.safetensors"
    write_tables(file, {"table": torch.ones(1 << 18, 64)})
    with monkeypatch.context() as patched:
        patched.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 << 20))
        tables = open_tables(file, copy_on_write=True)
        tables.read_ahead()
        time.sleep(0.2)
        assert mapping_of(file)["Rss"] < 1 << 20
    del tables
    tables = open_tables(file, copy_on_write=True)
    tables.read_ahead()
    until_s = time.monotonic() + 60
    while mapping_of(file)["Rss"] < 64 << 20:
        assert time.monotonic() < until_s, "it was not read ahead"
        time.sleep(0.02)
    assert float(tables.matrices["float32_64"].sum()) == 1 << 24
    assert mapping_of(file)["Anonymous"] == 0
    assert tables.is_writable


def mapping_of(path: Path) -> dict[str, Any]:
    """What the kernel says of this process's mapping of a file (smaps of proc(5)): bytes, and its VmFlags."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = rest[-1] == str(path)
        elif inside:
            found[first[:-1]] = int(rest[0]) * 1024 if rest[-1] == "kB" else rest
    return found


Change = Callable[[dict[str, Any]], None]


def rewrite(path: Path, change: Change) -> None:
    """Change the header of a file and keep its data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def tensor(**fields: Any) -> Change:
    """Other fields for the tensor float32_32, which comes first and is (7, 32)."""
    return lambda header: header["float32_32"].update(fields)


def said(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Change what the header says of the tables."""

    def change(header: dict[str, Any]) -> None:
        data = json.loads(header["__metadata__"]["plait.tables"])
        edit(data)
        header["__metadata__"]["plait.tables"] = json.dumps(data)

    return change


BROKEN: dict[str, tuple[Change, str]] = {
    "gap": (tensor(data_offsets=[8, 904]), "offset for tensor `float32_32`"),
    "other dtype": (tensor(dtype="I32"), "not what its group says"),
    "no tables": (lambda header: header.pop("__metadata__"), "plait.tables"),
    "later version": (said(lambda data: data.update(version=2)), r"plait\.tables\.version"),
    "no name": (said(lambda data: data["tables"][0].update(name=3)), r"tables\.0\.name"),
    "odd policy": (said(lambda data: data["tables"][0].update(out_of_range="?")), r"tables\.0\.out_of_range"),
    "more rows": (said(lambda data: data["tables"][0].update(rows=10**6)), "float32_32"),
    "true rows": (said(lambda data: data["tables"][0].update(rows=True)), r"tables\.0\.rows"),
    "other width": (said(lambda data: data["tables"][0].update(dim=5)), "wide"),
    "lost table": (said(lambda data: data["groups"][0]["tables"].clear()), "every table once"),
    "held twice": (said(lambda data: data["groups"].append(data["groups"][0])), "every table once"),
    "other format": (said(lambda data: data["groups"][0].update(format="int8")), "group says"),
    "no groups": (said(lambda data: data.update(groups=[])), "every table once"),
    "other group": (said(lambda data: data["groups"][0].update(name="x")), "are not the groups"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_header_is_refused(fault: str, path: Path):
    """The refusal names the file and what is wrong in it."""
    change, says = BROKEN[fault]
    rewrite(path, change)
    with pytest.raises(BadTableFile, match=says) as refused:
        open_tables(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("tables", "options", "says"),
    [
        *[({"odd": torch.zeros(shape)}, {}, "table odd") for shape in ((0, 4), (4, 0), (4,), (2, 2, 2))],
        (WEIGHTS, {"out_of_range": "?"}, "none of error, clip, hash"),
        (WEIGHTS, {"formats": {"t0": "int4"}}, "none of float32, float16, int8"),
        (WEIGHTS, {"formats": {"tO": "int8"}}, "table tO: there is none; the tables are t0, t1, t2, t3, t4"),
    ],
)
def test_what_can_not_be_stored_is_refused_by_name(tables: Weights, options: dict[str, Any], says: str, tmp_path: Path):
    """Before anything is written."""
    with pytest.raises(ValueError, match=says):
        write_tables(tmp_path / "x", tables, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 4096, -1])
def test_a_file_cut_short_is_refused(kept: int, path: Path):
    """Wherever it is cut, before a byte of it is mapped."""
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadTableFile, match=r"cut short|not JSON"):
        open_tables(path)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_files_never_crash(data: st.DataObject, path: Path):
    """Changed bytes anywhere in the header either leave a readable file or are refused as `BadTableFile`."""
    write_tables(path, WEIGHTS, formats=MIXED)
    content = bytearray(path.read_bytes())
    end = content.index(b"    ")
    for position in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=3)):
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        opened = open_tables(path)
    except BadTableFile:
        return
    assert all(bool(matrix.flatten()[-1:].numel()) for matrix in opened.matrices.values())
