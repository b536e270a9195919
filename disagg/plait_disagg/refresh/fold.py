"""A package with its updates folded into its files, for starting many workers or after many updates.

It is also the naive counterpart of the live refresh: opened fresh, its scores equal those of refreshed workers, bit
for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from plait_disagg.graph.small_tables import rows_name
from plait_disagg.package.items import save_tensors
from plait_disagg.package.manifest import (
    CONSTANTS,
    MANIFEST,
    TABLES,
    Manifest,
    PackageError,
    new_folder,
    sha256_of,
    write_manifest,
)
from plait_disagg.package.read import Package, open_package
from plait_disagg.refresh.check import checked, decoded_rows
from plait_disagg.refresh.errors import BadUpdate
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.update import read_update
from plait_disagg.tables.container import map_container


def fold_updates(folder: Path, out: Path) -> Manifest:
    """Write the package at `folder` with all updates of its journal into the new folder `out`.

    `out` appears complete or not at all; its version is that of the last update. Raises `PackageError`, OSError.
    """
    if out.exists():
        raise PackageError(f"{out} exists already")
    if (folder / MANIFEST).is_file() and out.resolve().is_relative_to(folder.resolve()):
        raise PackageError(f"{out} lies in the package that is folded")
    try:
        with new_folder(out) as draft:
            return _write(open_package(folder), draft)
    except BadUpdate as error:
        raise PackageError(f"{folder}: an update of its journal cannot be read: {error}") from error


def _write(package: Package, draft: Path) -> Manifest:
    for name in package.manifest.files:
        shutil.copyfile(package.folder / name, draft / name)
        if sha256_of(draft / name) != package.manifest.files[name]:
            raise PackageError(f"{package.folder / name} is not what was packaged: its hash differs")
    version, constants = package.manifest.version, dict(package.constants)
    for path in Journal(package.folder).after(version):
        update = read_update(path)
        _write_rows(draft / TABLES, checked(package, update, version))
        constants |= update.constants
        for name, (ids, new) in decoded_rows(update, package.stored, package.hn_tables).items():
            constants[rows_name(name)] = constants[rows_name(name)].index_copy(0, ids, new)
        version = update.version
    save_tensors({name: tensor.contiguous() for name, tensor in constants.items()}, draft / CONSTANTS)
    files = {name: sha256_of(draft / name) for name in package.manifest.files}
    manifest = replace(package.manifest, version=version, files=files)
    write_manifest(draft, manifest)
    return manifest


def _write_rows(path: Path, rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write row by row, each at its place in the file."""
    container = map_container(path)
    with path.open("r+b") as file:
        for group, (ids, new) in rows.items():
            row_bytes = new.shape[1] * new.element_size()
            for row, values in zip(ids.tolist(), new, strict=True):
                file.seek(container.starts[group] + row * row_bytes)
                file.write(values.numpy().tobytes())
