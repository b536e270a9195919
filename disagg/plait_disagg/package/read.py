"""Opening a packaged model: everything in the folder is checked before it is used, and nothing in it is run as code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plait_disagg.graph.edit import live
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.execute import compile_program
from plait_disagg.graph.program import LOOKUP, Program, Ref
from plait_disagg.graph.small_tables import rows_name
from plait_disagg.graph.store import load_program
from plait_disagg.package.halves import CompiledDense, CompiledSparse
from plait_disagg.package.items import StoredItems, read_items
from plait_disagg.package.manifest import (
    CN,
    CONSTANTS,
    HN,
    ITEM_NAMES,
    ITEMS,
    TABLES,
    WHOLE,
    Manifest,
    PackageError,
    read_manifest,
    sha256_of,
)
from plait_disagg.package.memory import check_cn, check_hn
from plait_disagg.tables.container import BadTableFile
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import Tables
from plait_disagg.tables.storage import TableSet, open_tables
from plait_disagg.values import ModelCard


@dataclass(frozen=True)
class Package:
    """An open folder. Whatever is expensive to load is loaded on first use."""

    folder: Path
    manifest: Manifest

    def card(self, *, mode: str = "whole", version: str | None = None) -> ModelCard:
        """Return what clients must know about the model. `version`: that of a refresh; None: as packaged."""
        manifest = self.manifest
        return ModelCard(
            name=manifest.name,
            version=version or manifest.version,
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            largest_candidates=manifest.largest_candidates,
            items=manifest.items,
            mode=mode,
            id_rows=manifest.bounds,
            packaged=manifest.version,
        )

    def sparse(self, tables: Tables | None = None) -> CompiledSparse:
        """Load the CN half; with `tables` None, the folder's own, memory-mapped, and read ahead if there is room.

        Raises `PackageError`.
        """
        with self._blaming(CN):
            check_cn(self.cn, self.manifest, {table.name: table.dim for table in self.stored.tables})
            if tables is None:
                self.tables.read_ahead()
            served = tables or FusedTables(self.tables)
            program, left_out = without_rows(self.cn)
            known = {table.name: table for table in self.stored.tables}
            compiled = compile_program(self.cn, self.constants, served)
            return CompiledSparse(
                compiled,
                self.manifest.inputs,
                ids_program=compile_program(program, self.constants, served) if left_out else compiled,
                row_ports={name: known[table] for name, table in left_out.items()},
                tables=served,
            )

    def dense(self, device: torch.device | str = "cpu", *, prepares: bool = False) -> CompiledDense:
        """Load the HN half. `prepares`: batches may run on prepared programs, unless the package promises bits.

        Raises `PackageError`.
        """
        with self._blaming(HN):
            check_hn(self.hn, self.cn, self.manifest)
            program = compile_program(self.hn, self.constants, device=device)
            return CompiledDense(program, device, prepares=prepares and self.manifest.cut.tiled)

    @cached_property
    def tables(self) -> TableSet:
        """The tables, memory-mapped; a refresh writes to copies of their pages. Raises `PackageError`."""
        with self._blaming(TABLES) as path:
            return open_tables(path, copy_on_write=True)

    @cached_property
    def stored(self) -> TableSet:
        """The tables, mapped for reading only: what their header says, without a row in memory. Raises
        `PackageError`."""
        with self._blaming(TABLES) as path:
            return open_tables(path)

    @cached_property
    def items(self) -> StoredItems | None:
        """The items' features, if the package has them. Raises `PackageError`."""
        if self.manifest.items is None:
            return None
        items = read_items(self.folder / ITEMS, self.folder / ITEM_NAMES, self.manifest.inputs)
        if len(items) != self.manifest.items:
            raise PackageError(f"{self.folder / ITEMS} has {len(items)} items, not {self.manifest.items}")
        return items

    @cached_property
    def whole(self) -> Program:
        """The model as it was captured."""
        return self._program(WHOLE)

    @cached_property
    def cn(self) -> Program:
        """The CN program."""
        return self._program(CN)

    @cached_property
    def hn(self) -> Program:
        """The HN program."""
        return self._program(HN)

    @cached_property
    def hn_tables(self) -> frozenset[str]:
        """The small tables whose rows the HN holds as constants (`graph.small_tables`)."""
        held = {port.name for port in self.hn.constants}
        return frozenset(table.name for table in self.stored.tables if rows_name(table.name) in held)

    @cached_property
    def constants(self) -> dict[str, torch.Tensor]:
        """Weights of the dense layers by name. Raises `PackageError`."""
        with self._blaming(CONSTANTS) as path:
            constants: dict[str, torch.Tensor] = load_file(path)
            return constants

    def _program(self, name: str) -> Program:
        with self._blaming(name) as path:
            return load_program(path.read_text(encoding="utf-8"))

    @contextmanager
    def _blaming(self, name: str) -> Iterator[Path]:
        """Yield the path of a file; what goes wrong with it is a `PackageError` that names it."""
        path = self.folder / name
        try:
            yield path
        except (BadProgram, BadTableFile, OSError, SafetensorError, UnicodeDecodeError) as error:
            said = str(error)
            raise PackageError(said if str(path) in said else f"{path}: {said}") from error


def open_package(folder: Path) -> Package:
    """Open a package, verifying its files against their checksums (all but the tables). Raises `PackageError`."""
    manifest = read_manifest(folder)
    for name, digest in manifest.files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise PackageError(f"{path} is missing")
        # Tables are not hashed: they may be terabytes, and are mapped rather than read; opening checks their header.
        if name != TABLES and sha256_of(path) != digest:
            raise PackageError(f"{path} is not the file that was packaged: its SHA-256 differs")
    for name in (WHOLE, CN, HN, CONSTANTS, TABLES):
        if name not in manifest.files:
            raise PackageError(f"{folder} is no whole package: {name} is not listed")
    return Package(folder=folder, manifest=manifest)


def without_rows(program: Program) -> tuple[Program, dict[str, str]]:
    """Return the CN program without the lookups whose rows are only sent, and the tables of the outputs that are ids
    in their place.

    The outputs keep their names and order; the ids are those passed to the lookup: (..., ) integers that the table's
    out-of-range policy has not yet been applied to. Rows that the CN itself reads are unchanged.
    """
    read = {name for node in program.nodes for name in node.inputs}
    lookups = (node for node in program.nodes if node.op == LOOKUP and node.kwargs["mode"] == "rows")
    bare = {node.name: node for node in lookups if node.name not in read}
    tables = {name: str(bare[ref.name].kwargs["table"]) for name, ref in program.outputs if ref.name in bare}
    outputs = tuple((name, Ref(bare[ref.name].inputs[0]) if name in tables else ref) for name, ref in program.outputs)
    return live(replace(program, outputs=outputs)), tables
