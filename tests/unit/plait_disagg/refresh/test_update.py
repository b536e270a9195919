"""An update is read whole or refused, and refused if it does not fit the package; the error names the field."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from plait_disagg.package.read import Package
from plait_disagg.refresh.check import checked
from plait_disagg.refresh.errors import BadUpdate
from plait_disagg.refresh.update import Update, UpdatedRows, read_update, read_update_manifest, write_update
from plait_disagg.tables.formats import encode_rows
from support import refresh as kit


@pytest.fixture
def made(parts: Package) -> Update:
    """An update that is fine."""
    return kit.update(parts, "1", "2", seed=1)


def with_rows(made: Update, table: str, **changes: torch.Tensor) -> Update:
    """The update with other ids or rows of a table."""
    return dataclasses.replace(made, rows={**made.rows, table: dataclasses.replace(made.rows[table], **changes)})


def with_constants(made: Update, **changes: torch.Tensor) -> Update:
    """The update with other constants."""
    return dataclasses.replace(made, constants={**made.constants, **changes})


def spoilt(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """The tensor with one number replaced."""
    other = tensor.clone()
    other.view(-1)[-1] = value
    return other


def test_what_is_written_is_read(made, tmp_path):
    """Names, versions and every bit; an update that changes nothing could only be a mistake."""
    found = read_update(kit.written(tmp_path / "u", made))
    assert (found.model, found.base, found.version) == ("parts", "1", "2")
    assert all(torch.equal(found.rows[name].ids, rows.ids) for name, rows in made.rows.items())
    assert all(torch.equal(found.rows[name].rows, rows.rows) for name, rows in made.rows.items())
    assert found.constants.keys() == made.constants.keys()
    assert all(torch.equal(found.constants[name], tensor) for name, tensor in made.constants.items())
    folder = kit.written(tmp_path / "nothing", Update(model="parts", base="1", version="2"))
    with pytest.raises(BadUpdate, match="changes nothing"):
        read_update_manifest(folder)


def test_a_part_can_be_read_alone(made, tmp_path):
    """An HN need not read gigabytes of rows."""
    folder = kit.written(tmp_path / "u", made)
    (folder / "rows.safetensors").unlink()
    found = read_update(folder, rows=False)
    assert not found.rows
    assert found.constants


def cut_short(folder: Path) -> None:
    """Half a file, as a copy that was interrupted leaves it."""
    data = (folder / "rows.safetensors").read_bytes()
    (folder / "rows.safetensors").write_bytes(data[: len(data) // 2])


def rewritten(name: str, data: bytes) -> Callable[[Path], None]:
    """Another file with its own check sum: whoever made it meant it."""

    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(data)
        change(folder, "files", {**manifest(folder)["files"], name: hashlib.sha256(data).hexdigest()})

    return spoil


def manifest(folder: Path) -> dict[str, Any]:
    """update.json."""
    found: dict[str, Any] = json.loads((folder / "update.json").read_text())
    return found


def change(folder: Path, key: str, value: Any) -> None:
    """Another value in update.json."""
    (folder / "update.json").write_text(json.dumps({**manifest(folder), key: value}))


def changed(key: str, value: Any) -> Callable[[Path], None]:
    """`change`, later."""
    return lambda folder: change(folder, key, value)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda folder: (folder / "update.json").unlink(), "update.json"),
        (lambda folder: (folder / "update.json").write_text("{"), "update.json"),
        (lambda folder: (folder / "update.json").write_text("[]"), "update.json"),
        (changed("surprise", 1), "update.json"),
        (changed("format", 2), "update.json.format"),
        (changed("model", 7), "update.json.model"),
        (changed("version", "../../etc"), "update.json.version"),
        (changed("version", "1"), "update.json.version"),
        (changed("base", ""), "update.json.base"),
        (changed("rows", ["items", "items"]), "update.json.rows"),
        (changed("rows", ["items", "nobody"]), "rows.safetensors."),
        (changed("constants", ["top.bias"]), "constants.safetensors."),
        (changed("files", {}), "update.json.files"),
        (changed("files", {"rows.safetensors": "0", "constants.safetensors": "0"}), "update.json.files.rows"),
        (cut_short, "update.json.files.rows.safetensors"),
        (lambda folder: (folder / "constants.safetensors").unlink(), "constants.safetensors"),
        (rewritten("constants.safetensors", b"\x00" * 40), "constants.safetensors"),
        (rewritten("rows.safetensors", save({"x": torch.zeros(1)})), "rows.safetensors."),
    ],
)
def test_a_spoilt_folder_is_refused(made, tmp_path, spoil, field):
    """Whatever is wrong with it, by its field."""
    folder = kit.written(tmp_path / "u", made)
    spoil(folder)
    with pytest.raises(BadUpdate) as refused:
        read_update(folder)
    assert refused.value.field.startswith(field)


def test_a_good_update_fits(parts, made):
    """Rows come out as the tables store them, in the order of their matrices."""
    found = checked(parts, made, "1")
    assert {ids.numel() for ids, _ in found.values()} == {kit.LIKED // 3, kit.ITEMS // 3, kit.KINDS // 3}
    assert all(bool((ids[1:] > ids[:-1]).all()) for ids, _ in found.values())


def test_stored_rows_and_floats_mean_the_same(parts, made):
    """A trainer may quantise by itself."""
    formats = {"liked": "int8", "items": "float32", "kinds": "float16"}
    stored = dataclasses.replace(
        made,
        rows={
            name: UpdatedRows(ids=it.ids, rows=encode_rows(it.rows, formats[name])) for name, it in made.rows.items()
        },
    )
    one, other = checked(parts, made, "1"), checked(parts, stored, "1")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[group][1], other[group][1]) for group in one)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda u: dataclasses.replace(u, model="other"), "update.json.model"),
        (lambda u: dataclasses.replace(u, base="0"), "update.json.base"),
        (lambda u: dataclasses.replace(u, rows={**u.rows, "nobody": u.rows["items"]}), "rows.nobody"),
        (lambda u: with_rows(u, "items", ids=u.rows["items"].ids - 60), "rows.items.ids"),
        (lambda u: with_rows(u, "items", ids=u.rows["items"].ids + kit.ITEMS), "rows.items.ids"),
        (lambda u: with_rows(u, "items", ids=u.rows["items"].ids * 0), "rows.items.ids"),
        (lambda u: with_rows(u, "items", ids=u.rows["items"].ids.int()), "rows.items.ids"),
        (lambda u: with_rows(u, "items", ids=u.rows["items"].ids[:0]), "rows.items.ids"),
        (lambda u: with_rows(u, "items", rows=u.rows["items"].rows[:, :-1]), "rows.items.rows"),
        (lambda u: with_rows(u, "items", rows=u.rows["items"].rows[:-1]), "rows.items.rows"),
        (lambda u: with_rows(u, "items", rows=u.rows["items"].rows.double()), "rows.items.rows"),
        (lambda u: with_rows(u, "items", rows=spoilt(u.rows["items"].rows, float("nan"))), "rows.items.rows"),
        (lambda u: with_rows(u, "kinds", rows=spoilt(u.rows["kinds"].rows, 1e6)), "rows.kinds.rows"),
        (lambda u: with_rows(u, "kinds", rows=spoilt(u.rows["kinds"].rows.half(), float("nan"))), "rows.kinds.rows"),
        (lambda u: with_rows(u, "liked", rows=torch.full((20, 16), 255, dtype=torch.uint8)), "rows.liked.rows"),
        (lambda u: with_constants(u, nobody=torch.zeros(1)), "constants.nobody"),
        (lambda u: with_constants(u, **{"top.bias": torch.zeros(2)}), "constants.top.bias"),
        (lambda u: with_constants(u, **{"top.bias": torch.zeros(1, dtype=torch.float64)}), "constants.top.bias"),
        (lambda u: with_constants(u, **{"top.bias": torch.tensor([float("nan")])}), "constants.top.bias"),
        (lambda u: dataclasses.replace(u, constants={"top.weight": u.constants["top.weight"]}), "constants"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(parts, made, tmp_path, spoil, field):
    """Through the file, as it would come: by table and constant."""
    bad = read_update(kit.written(tmp_path / "u", spoil(made)))
    with pytest.raises(BadUpdate) as refused:
        checked(parts, bad, "1")
    assert refused.value.field == field


def test_the_error_travels_between_processes():
    """Serve pickles what a replica answers."""
    error = pickle.loads(pickle.dumps(BadUpdate("rows.items.ids", "id 9 is outside")))
    assert (error.field, str(error)) == ("rows.items.ids", "rows.items.ids: id 9 is outside")


def test_an_update_that_cannot_be_written_leaves_nothing(made, tmp_path):
    """Else the next attempt finds a folder that is there already, and no update; and one that is published does not
    change under the reader."""
    with pytest.raises(NotImplementedError):
        write_update(tmp_path / "u", with_constants(made, w=torch.empty(3, device="meta")))
    assert list(tmp_path.iterdir()) == []
    kit.written(tmp_path / "u", made)
    with pytest.raises(FileExistsError):
        write_update(tmp_path / "u", made)
