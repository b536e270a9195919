"""From a retrained module to an update: what differs from the model that is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.costs import cuttable
from plait_disagg.graph.store import dump_program
from plait_disagg.package.manifest import NAME
from plait_disagg.package.read import Package
from plait_disagg.refresh.check import checked
from plait_disagg.refresh.errors import BadUpdate
from plait_disagg.refresh.journal import Journal
from plait_disagg.refresh.live_package import open_live
from plait_disagg.refresh.update import Update, UpdatedRows, read_update
from plait_disagg.tables.formats import encode_rows


def make_update(folder: Path, module: nn.Module, *, version: str) -> Update:
    """Return the update from the newest version of the package at `folder` to `module` (in evaluation mode).

    `module` must be the packaged module with other weights. Rows are given as the tables store them.

    Raises `BadUpdate` if it is another model, or the same weights; `UnsupportedOperator` as packaging does;
    `PackageError`.
    """
    if not NAME.fullmatch(version):
        raise BadUpdate("version", f"{version!r} must match {NAME.pattern}")
    live = open_live(folder, sparse=True, dense=False)
    package = live.package
    captured = capture(module, package.manifest.inputs)
    if dump_program(captured.program) != dump_program(package.whole):
        raise BadUpdate("module", "is not the model that was packaged: its operators or shapes differ")
    ready = cuttable(
        captured.program,
        captured.constants,
        captured.inputs,
        table_rows={name: int(weight.shape[0]) for name, weight in captured.tables.items()},
        exact=not package.manifest.cut.tiled,
    )
    old = _constants(package)
    new = {**captured.constants, **ready.constants}
    update = Update(
        model=package.manifest.name,
        base=live.version,
        version=version,
        rows=_changed_rows(package, captured.tables),
        constants={name: new[name].detach() for name in old if name in new and not torch.equal(new[name], old[name])},
    )
    if not update.rows and not update.constants:
        raise BadUpdate("module", f"has the weights of version {live.version}")
    if version == live.version:
        raise BadUpdate("version", f"{version} is what is served; choose another")
    checked(package, update, live.version)
    return update


def _constants(package: Package) -> dict[str, torch.Tensor]:
    """Return the constants of the newest version."""
    constants = dict(package.constants)
    for path in Journal(package.folder).after(package.manifest.version):
        constants |= read_update(path, rows=False).constants
    return constants


def _changed_rows(package: Package, weights: Mapping[str, torch.Tensor]) -> dict[str, UpdatedRows]:
    """Return the changed rows by table, given the package's matrices at the newest version.

    Rows are compared as they are stored.
    """
    changed: dict[str, UpdatedRows] = {}
    for name, place in package.tables.places.items():
        weight, shape = weights[name], (place.table.rows, place.table.dim)
        if tuple(weight.shape) != shape:
            raise BadUpdate(f"table {name}", f"is {tuple(weight.shape)}, the package's {shape}; package the model anew")
        try:
            stored = encode_rows(weight, place.group.format)
        except ValueError as error:
            raise BadUpdate(f"table {name}", str(error)) from error
        before = package.tables.matrices[place.group.name][place.first : place.first + place.table.rows]
        ids = (stored != before).any(dim=1).nonzero().flatten()
        if ids.numel():
            changed[name] = UpdatedRows(ids=ids, rows=stored[ids])
    return changed
