"""package.json: what a packaged model is, and the checksums of the other files in its folder.

::

    FOLDER/
        package.json             this file
        whole.json               the model as captured: one program, nothing tiled
        cn.json  hn.json         its two halves
        constants.safetensors    weights of the dense layers, by name
        tables.safetensors       one matrix per group of tables
        items.safetensors        optional: the item-side inputs of each item, by item id
        items.json               optional: the items' names, in the order of their ids

Nothing in a folder is code: programs are operators of a fixed vocabulary, everything else is numbers and names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import StringConstraints, TypeAdapter, ValidationError

from plait_disagg.graph.inputs import Input, check_inputs, input_from_json, input_to_json

MANIFEST = "package.json"
WHOLE, CN, HN = "whole.json", "cn.json", "hn.json"
CONSTANTS, TABLES = "constants.safetensors", "tables.safetensors"
ITEMS, ITEM_NAMES = "items.safetensors", "items.json"

FORMAT = 1
"""The version of the folder's layout."""

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
Name = Annotated[str, StringConstraints(pattern=NAME.pattern)]
_MAX_MANIFEST_BYTES = 16 << 20


class PackageError(Exception):
    """The folder is not a packaged model that can be served; the message names the file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class CutFacts:
    """How the model was cut.

    `tiled`: user-side values are computed once per user; `candidates`: size of the request that the cut was made
    for.
    """

    cutter: str
    tiled: bool
    candidates: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of package.json (see the module docstring).

    `bounds`: rows of the table that an input's ids index directly, if an id outside is an error. `outputs`: name to
    the shape of one row.
    """

    name: Name
    version: str
    inputs: tuple[Input, ...]
    outputs: Mapping[str, tuple[int, ...]]
    bounds: Mapping[str, int]
    cut: CutFacts
    largest_candidates: int
    items: int | None
    files: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `folder` at the end, or goes if the block raises. Raises
    FileExistsError."""
    if folder.exists():
        raise FileExistsError(errno.EEXIST, "it exists already", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp's folders are private
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write package.json last of all files, so that a folder that has one is complete."""
    inputs = [input_to_json(item) for item in manifest.inputs]
    data = {"format": FORMAT, **vars(manifest), "inputs": inputs, "cut": vars(manifest.cut)}
    (folder / MANIFEST).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read package.json. Raises `PackageError`, naming the file and the field, if there is no valid package."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise PackageError(f"{path} is larger than {_MAX_MANIFEST_BYTES} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PackageError(f"{folder} is no packaged model: {path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{path} is not JSON") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise PackageError(f"{path}: format {found!r} is not {FORMAT}; package the model again")
    try:
        inputs = tuple(input_from_json(item) for item in data.get("inputs", ()))
        check_inputs(inputs)
        return TypeAdapter(Manifest).validate_python({**data, "inputs": inputs})
    except ValidationError as error:
        first = error.errors()[0]
        raise PackageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise PackageError(f"{path}: {error}") from error


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
