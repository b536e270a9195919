"""Opening a packaged model: everything in the folder is checked before it is used, and nothing in it is run as code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from plait_disagg.graph.edit import live
from plait_disagg.graph.errors import BadProgram
from plait_disagg.graph.execute import Compiled, compile_program
from plait_disagg.graph.program import LOOKUP, Node, Program, Ref
from plait_disagg.graph.small_tables import rows_name
from plait_disagg.graph.store import load_program
from plait_disagg.package.halves import BareRows, CompiledDense, CompiledSparse
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
from plait_disagg.tables.errors import BadTableFile
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import Tables
from plait_disagg.tables.storage import TableSet, open_tables
from plait_disagg.values import ModelCard

_NOT_HASHED = (TABLES,)
"""Files that are not hashed: tables may be terabytes, and are mapped rather than read; their header is checked when
they are opened."""


@dataclass(frozen=True)
class Package:
    """An open folder. Whatever is expensive to load is loaded on first use. `ahead`: tables are read ahead."""

    folder: Path
    manifest: Manifest
    ahead: bool = True

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
        """Load the CN half; with `tables` None, the folder's own, memory-mapped. Raises `PackageError`."""
        try:
            check_cn(self.cn, self.manifest, {table.name: table.dim for table in self.stored.tables})
        except BadProgram as error:
            raise PackageError(f"{self.folder / CN}: {error}") from error
        served = tables or FusedTables(self.tables)
        return CompiledSparse(self._compiled(self.cn, served), self.manifest.inputs, self._bare_rows(served))

    def dense(self, device: torch.device | str = "cpu", *, prepares: bool = False) -> CompiledDense:
        """Load the HN half. `prepares`: batches may run on prepared programs, unless the package promises bits.

        Raises `PackageError`.
        """
        try:
            check_hn(self.hn, self.cn, self.manifest)
            program = compile_program(self.hn, self.constants, device=device)
            return CompiledDense(program, device, prepares=prepares and self.manifest.cut.tiled)
        except BadProgram as error:
            raise PackageError(f"{self.folder / HN}: {error}") from error

    @cached_property
    def tables(self) -> TableSet:
        """The tables, memory-mapped and read ahead if there is room; a refresh writes to copies of their pages.

        Raises `PackageError`.
        """
        try:
            return open_tables(self.folder / TABLES, copy_on_write=True, ahead=self.ahead)
        except (BadTableFile, OSError) as error:
            raise PackageError(str(error)) from error

    @cached_property
    def stored(self) -> TableSet:
        """The tables, mapped for reading only: what their header says, without a row in memory. Raises
        `PackageError`."""
        try:
            return open_tables(self.folder / TABLES)
        except (BadTableFile, OSError) as error:
            raise PackageError(str(error)) from error

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
        try:
            constants: dict[str, torch.Tensor] = load_file(self.folder / CONSTANTS)
        except (OSError, SafetensorError) as error:
            raise PackageError(f"{self.folder / CONSTANTS}: {error}") from error
        return constants

    def _bare_rows(self, tables: Tables) -> BareRows | None:
        program, ports = without_rows(self.cn)
        if not ports:
            return None
        known = {table.name: table for table in self.stored.tables}
        by_port = {port.name: known[port.table] for port in ports}
        return BareRows(program=self._compiled(program, tables), ports=by_port, tables=tables)

    def _compiled(self, program: Program, tables: Tables) -> Compiled:
        try:
            return compile_program(program, self.constants, tables)
        except BadProgram as error:
            raise PackageError(f"{self.folder / CN}: {error}") from error

    def _program(self, name: str) -> Program:
        try:
            return load_program((self.folder / name).read_text(encoding="utf-8"))
        except (BadProgram, OSError, UnicodeDecodeError) as error:
            raise PackageError(f"{self.folder / name}: {error}") from error


def open_package(folder: Path, *, ahead: bool = True) -> Package:
    """Open a package, verifying its files against their checksums (all but the tables). Raises `PackageError`."""
    manifest = read_manifest(folder)
    for name, digest in manifest.files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise PackageError(f"{path} is missing")
        if name not in _NOT_HASHED and sha256_of(path) != digest:
            raise PackageError(f"{path} is not the file that was packaged: its SHA-256 differs")
    for name in (WHOLE, CN, HN, CONSTANTS, TABLES):
        if name not in manifest.files:
            raise PackageError(f"{folder} is no whole package: {name} is not listed")
    return Package(folder=folder, manifest=manifest, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPort:
    """A crossing output: `name` is the rows of `table` for the value `ids`, an input or a node of the CN program."""

    name: str
    table: str
    ids: str


def without_rows(program: Program) -> tuple[Program, tuple[CachedPort, ...]]:
    """Return the CN program without the lookups whose rows are only sent, and what it leaves out.

    The outputs keep their names and order; those of the ports are ids, as passed to the lookup: (..., ) integers
    that the table's out-of-range policy has not yet been applied to. Rows that the CN itself reads are unchanged.
    """
    read = {name for node in program.nodes for name in node.inputs}
    bare = {node.name: node for node in program.nodes if _is_rows(node) and node.name not in read}
    ports = tuple(_port(name, bare[ref.name]) for name, ref in program.outputs if ref.name in bare)
    ids = {port.name: Ref(port.ids) for port in ports}
    outputs = tuple((name, ids.get(name, ref)) for name, ref in program.outputs)
    return live(replace(program, outputs=outputs)), ports


def _is_rows(node: Node) -> bool:
    return node.op == LOOKUP and node.kwargs["mode"] == "rows" and isinstance(node.args[0], Ref)


def _port(name: str, node: Node) -> CachedPort:
    ids = node.args[0]
    assert isinstance(ids, Ref)
    return CachedPort(name=name, table=str(node.kwargs["table"]), ids=ids.name)
