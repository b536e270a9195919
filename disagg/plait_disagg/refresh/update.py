"""An update on disk: what changes from one version of a model to the next.

::

    UPDATE/
        update.json              model, base and new version, what changes, the files with their SHA-256
        rows.safetensors         optional: T:ids (k,) int64 and T:rows of each table T
        constants.safetensors    optional: weights by the names that they have in the package

`T:rows` are (k, D) float32, or as the table stores them (`plait_disagg.tables.formats`). A folder is untrusted: this
module checks that it is complete and matches its manifest, `check.py` that it fits a package.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from plait_disagg.package.manifest import NAME, new_folder
from plait_disagg.refresh.errors import BadUpdate

MANIFEST = "update.json"
ROWS, CONSTANTS = "rows.safetensors", "constants.safetensors"

FORMAT = 1
"""The version of the folder's layout."""

_KEYS = frozenset({"format", "model", "base", "version", "rows", "constants", "files"})
_IDS, _ROWS = ":ids", ":rows"
_MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedRows:
    """New rows of one table. `ids`: (k,) int64, distinct; `rows`: (k, D) float32, or as the table stores them."""

    ids: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateManifest:
    """The contents of update.json: `rows` (tables) and `constants` (names) that change; `files`: SHA-256 by name."""

    model: str
    base: str
    version: str
    rows: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Update:
    """From version `base` of `model` to `version`: rows by table, and constants by name."""

    model: str
    base: str
    version: str
    rows: Mapping[str, UpdatedRows] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_update(folder: Path, update: Update) -> UpdateManifest:
    """Write a new folder, which appears complete or not at all.

    The contents are not checked: whoever applies the update does that. Raises OSError.
    """
    files: dict[str, str] = {}
    rows = {table + _IDS: one.ids.contiguous() for table, one in update.rows.items()}
    rows |= {table + _ROWS: one.rows.detach().contiguous() for table, one in update.rows.items()}
    constants = {name: tensor.detach().contiguous() for name, tensor in update.constants.items()}
    with new_folder(folder) as draft:
        for name, tensors in ((ROWS, rows), (CONSTANTS, constants)):
            if tensors:
                data = save({key: tensor.clone() for key, tensor in tensors.items()})  # it refuses what shares memory
                (draft / name).write_bytes(data)
                files[name] = hashlib.sha256(data).hexdigest()
        manifest = UpdateManifest(
            model=update.model,
            base=update.base,
            version=update.version,
            rows=tuple(sorted(update.rows)),
            constants=tuple(sorted(update.constants)),
            files=files,
        )
        (draft / MANIFEST).write_text(json.dumps(_to_json(manifest), indent=1) + "\n", encoding="utf-8")
    return manifest


def read_update_manifest(folder: Path) -> UpdateManifest:
    """Read update.json. Raises `BadUpdate` if the folder is not an update or the file is not the output of
    `write_update`."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BadUpdate(MANIFEST, f"larger than {_MAX_MANIFEST_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadUpdate(MANIFEST, f"{folder} is no update: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadUpdate(MANIFEST, "not JSON") from error
    if not isinstance(data, dict) or data.keys() != _KEYS:
        raise BadUpdate(MANIFEST, f"must be an object with exactly {', '.join(sorted(_KEYS))}")
    if data["format"] != FORMAT or isinstance(data["format"], bool):
        raise BadUpdate(f"{MANIFEST}.format", f"{str(data['format'])[:60]} is not {FORMAT}")
    manifest = _parse(data)
    if not manifest.rows and not manifest.constants:
        raise BadUpdate(MANIFEST, "changes nothing: neither rows nor constants")
    return manifest


def read_update(folder: Path, *, rows: bool = True) -> Update:
    """Read the update, with or without its rows. Each file is read once: what is hashed is what is used.

    Raises `BadUpdate` as `read_update_manifest` does, and for a file that is missing, truncated, has another hash,
    or does not contain what update.json lists.
    """
    manifest = read_update_manifest(folder)
    new_rows = _tensors(folder, manifest, ROWS) if rows and manifest.rows else {}
    new_constants = _tensors(folder, manifest, CONSTANTS) if manifest.constants else {}
    wanted = {table + suffix for table in manifest.rows for suffix in (_IDS, _ROWS)} if rows else set()
    _same_names(ROWS, wanted, new_rows)
    _same_names(CONSTANTS, set(manifest.constants), new_constants)
    return Update(
        model=manifest.model,
        base=manifest.base,
        version=manifest.version,
        rows={
            table: UpdatedRows(ids=new_rows[table + _IDS], rows=new_rows[table + _ROWS])
            for table in (manifest.rows if rows else ())
        },
        constants=new_constants,
    )


def _tensors(folder: Path, manifest: UpdateManifest, name: str) -> dict[str, torch.Tensor]:
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise BadUpdate(name, f"cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != manifest.files[name]:
        raise BadUpdate(f"{MANIFEST}.files.{name}", "the file's SHA-256 differs (cut short, or another file)")
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadUpdate(name, f"not safetensors: {error}") from error
    return tensors


def _same_names(file: str, wanted: set[str], found: Mapping[str, torch.Tensor]) -> None:
    odd = wanted ^ found.keys()
    if odd:
        name = min(odd)
        raise BadUpdate(f"{file}.{name}", "missing" if name in wanted else f"{MANIFEST} does not list it")


def _to_json(manifest: UpdateManifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model": manifest.model,
        "base": manifest.base,
        "version": manifest.version,
        "rows": list(manifest.rows),
        "constants": list(manifest.constants),
        "files": dict(manifest.files),
    }


def _parse(data: Mapping[str, Any]) -> UpdateManifest:
    for key in ("model", "base", "version"):
        if not isinstance(data[key], str) or not NAME.fullmatch(data[key]):
            raise BadUpdate(f"{MANIFEST}.{key}", f"{str(data[key])[:60]!r} must match {NAME.pattern}")
    if data["version"] == data["base"]:
        raise BadUpdate(f"{MANIFEST}.version", f"{data['version']} is the base itself")
    rows, constants = _names(data, "rows"), _names(data, "constants")
    files = data["files"]
    expected = {ROWS} if rows else set()
    expected |= {CONSTANTS} if constants else set()
    if not isinstance(files, dict) or files.keys() != expected:
        raise BadUpdate(f"{MANIFEST}.files", f"must list exactly {', '.join(sorted(expected)) or 'nothing'}")
    if not all(isinstance(digest, str) for digest in files.values()):
        raise BadUpdate(f"{MANIFEST}.files", "a SHA-256 is no text")
    return UpdateManifest(
        model=data["model"], base=data["base"], version=data["version"], rows=rows, constants=constants, files=files
    )


def _names(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = data[key]
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise BadUpdate(f"{MANIFEST}.{key}", "must be a list of names")
    if len(set(names)) != len(names):
        raise BadUpdate(f"{MANIFEST}.{key}", "has a name twice")
    return tuple(names)
