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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from safetensors import SafetensorError
from safetensors.torch import load, save

from plait_disagg.package.manifest import Name, new_folder
from plait_disagg.refresh.errors import BadUpdate

MANIFEST = "update.json"
ROWS, CONSTANTS = "rows.safetensors", "constants.safetensors"

FORMAT = 1
"""The version of the folder's layout."""

_IDS, _ROWS = ":ids", ":rows"
_MAX_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedRows:
    """New rows of one table. `ids`: (k,) int64, distinct; `rows`: (k, D) float32, or as the table stores them."""

    ids: torch.Tensor
    rows: torch.Tensor


def _are_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if len({"", *names}) != len(names) + 1:
        raise ValueError("has a name twice, or an empty one")
    return names


Format = Annotated[int, Field(ge=FORMAT, le=FORMAT)]
Names = Annotated[tuple[str, ...], AfterValidator(_are_distinct)]


class UpdateManifest(BaseModel):
    """The contents of update.json: `rows` (tables) and `constants` (names) that change; `files`: SHA-256 by name."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: Format
    model: Name
    base: Name
    version: Name
    rows: Names
    constants: Names
    files: Mapping[str, str]

    @field_validator("version")
    @classmethod
    def _goes_on(cls, version: str, info: ValidationInfo) -> str:
        if version == info.data.get("base"):
            raise ValueError(f"{version} is the base itself")
        return version

    @field_validator("files")
    @classmethod
    def _are_what_is_said(cls, files: Mapping[str, str], info: ValidationInfo) -> Mapping[str, str]:
        expected = [name for name, key in ((ROWS, "rows"), (CONSTANTS, "constants")) if info.data.get(key)]
        if files.keys() != {*expected}:
            raise ValueError(f"must list exactly {', '.join(expected) or 'nothing'}")
        return files


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
            format=FORMAT,
            model=update.model,
            base=update.base,
            version=update.version,
            rows=tuple(sorted(update.rows)),
            constants=tuple(sorted(update.constants)),
            files=files,
        )
        (draft / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return manifest


def read_update_manifest(folder: Path) -> UpdateManifest:
    """Read update.json. Raises `BadUpdate` if the folder is not an update or the file is not the output of
    `write_update`."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BadUpdate(MANIFEST, f"larger than {_MAX_MANIFEST_BYTES} bytes")
        manifest = UpdateManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadUpdate(MANIFEST, f"{folder} is no update: {error.strerror}") from error
    except ValidationError as error:
        raise bad_file(MANIFEST, error) from error
    if not manifest.rows and not manifest.constants:
        raise BadUpdate(MANIFEST, "changes nothing: neither rows nor constants")
    return manifest


def bad_file(name: str, error: ValidationError) -> BadUpdate:
    """Return the first fault of a JSON file."""
    first = error.errors()[0]
    return BadUpdate(".".join([name, *map(str, first["loc"][:1])]), first["msg"])


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
