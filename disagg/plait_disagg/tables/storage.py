"""Tables in a file: one safetensors file with one matrix per group, and JSON beside them that describes the matrices.

::

    write_tables(path, {"tables.genres": weight}, formats="int8")
    tables = FusedTables(open_tables(path))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, get_args

import torch
from pydantic import BaseModel, ValidationError

from plait_disagg.tables.container import BadTableFile, map_container, read_ahead, write_container
from plait_disagg.tables.formats import LAYOUTS, encode_rows
from plait_disagg.tables.values import OutOfRange, RowFormat, Table, TableGroup, row_bytes

_KEY = "plait.tables"
_CHUNK_BYTES = 64 << 20
"""How many bytes are encoded at once while writing."""

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DescribedGroup(TableGroup):
    """`tables`: whose rows the matrix has, in this order."""

    tables: tuple[str, ...]
    version: int = 0


class _Description(BaseModel):
    """What the file's metadata says of its tables."""

    version: Literal[1] = 1
    tables: tuple[Table, ...]
    groups: tuple[_DescribedGroup, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TablePlace:
    """Where a table's rows are: in the matrix of its group, from row `first` on."""

    table: Table
    group: TableGroup
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSet:
    """Tables, by name, and their rows.

    `matrices`: by group name, (rows of the group, columns) as in `formats.LAYOUTS`; read-only unless `is_writable`.
    `read_ahead` reads the rest of their file in the background, if there is one and it fits.
    """

    places: Mapping[str, TablePlace]
    matrices: Mapping[str, torch.Tensor]
    is_writable: bool = False
    read_ahead: Callable[[], object] = lambda: None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, in the order of the model."""
        return tuple(place.table for place in self.places.values())

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes."""
        return sum(matrix.nbytes for matrix in self.matrices.values())


def _grouped(tables: Mapping[str, tuple[Table, RowFormat]]) -> tuple[_DescribedGroup, ...]:
    """Group tables of equal format and width, in the order given.

    Groups whose rows are multiples of a large power of two come first, so that each matrix of the file starts at one
    and rows do not straddle more cache lines than necessary.
    """
    members: dict[tuple[RowFormat, int], list[str]] = {}
    for table, row_format in tables.values():
        members.setdefault((row_format, table.dim), []).append(table.name)

    def order(key: tuple[RowFormat, int]) -> tuple[int, str, int]:
        nbytes = row_bytes(key[1], key[0])
        return -(nbytes & -nbytes), key[0], key[1]

    return tuple(
        _DescribedGroup(name=f"{key[0]}_{key[1]}", dim=key[1], format=key[0], tables=tuple(members[key]))
        for key in sorted(members, key=order)
    )


def write_tables(
    path: Path,
    tables: Mapping[str, torch.Tensor],
    *,
    formats: RowFormat | Mapping[str, RowFormat] = "float32",
    out_of_range: OutOfRange | Mapping[str, OutOfRange] = "error",
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Write tables, (rows, D) float32 each, by name. `formats` and `out_of_range`: for all, or by table name.

    Needs memory for `chunk_bytes`, not for a second copy. Raises ValueError for a table that cannot be stored.
    """
    records = _records(tables, formats, out_of_range)
    described = _Description(tables=tuple(table for table, _ in records.values()), groups=_grouped(records))
    plan = [(it.name, LAYOUTS[it.format].dtype, shape) for it, shape in _matrices(described)]
    with write_container(path, plan, {_KEY: json.dumps(described.model_dump())}) as (file, starts):
        for name, place in _places(described).items():
            group = place.group
            start = starts[group.name] + place.first * row_bytes(group.dim, group.format)
            _write_rows(file, start, name, tables[name], group.format, chunk_bytes=chunk_bytes)


def open_tables(path: Path, *, copy_on_write: bool = False) -> TableSet:
    """Map a file of tables, reading only its header.

    See `container.map_container` for `copy_on_write` and what must not be done to the file. Raises `BadTableFile`,
    FileNotFoundError.
    """
    container = map_container(path, copy_on_write=copy_on_write)
    try:
        described = _Description.model_validate_json(container.metadata.get(_KEY, ""), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadTableFile(path, ".".join(["__metadata__", _KEY, *map(str, first["loc"])]), first["msg"]) from error
    _check_groups(path, described)
    if container.tensors.keys() != {group.name for group in described.groups}:
        raise BadTableFile(path, "tensors", f"{sorted(container.tensors)} are not the groups")
    for group, shape in _matrices(described):
        matrix = container.tensors[group.name]
        if tuple(matrix.shape) != shape or matrix.dtype != LAYOUTS[group.format].dtype:
            raise BadTableFile(path, group.name, f"{tuple(matrix.shape)} {matrix.dtype} is not what its group says")
    return TableSet(
        places=_places(described),
        matrices=container.tensors,
        is_writable=container.is_writable,
        read_ahead=partial(read_ahead, path, container.mapping),
    )


def _records(
    tables: Mapping[str, torch.Tensor],
    formats: RowFormat | Mapping[str, RowFormat],
    out_of_range: OutOfRange | Mapping[str, OutOfRange],
) -> dict[str, tuple[Table, RowFormat]]:
    for chosen in (formats, out_of_range):
        unknown = [] if isinstance(chosen, str) else sorted(chosen.keys() - tables.keys())
        if unknown:
            raise ValueError(f"table {unknown[0]}: there is none; the tables are {', '.join(tables)}")
    records = {}
    for name, rows in tables.items():
        shape = tuple(rows.shape)
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"table {name}: must be (rows, D) with at least one of each, not {shape}")
        row_format: RowFormat = _choice(formats, name, get_args(RowFormat))
        policy: OutOfRange = _choice(out_of_range, name, get_args(OutOfRange))
        records[name] = (Table(name=name, rows=shape[0], dim=shape[1], out_of_range=policy), row_format)
    if not records:
        raise ValueError("there are no tables: the model looks nothing up")
    return records


def _choice(word: Word | Mapping[str, Word], table: str, words: tuple[Word, ...]) -> Word:
    chosen = word if isinstance(word, str) else word.get(table, words[0])
    if chosen not in words:
        raise ValueError(f"table {table}: {chosen!r} is none of {', '.join(words)}")
    return chosen


def _places(described: _Description) -> dict[str, TablePlace]:
    """Return where each table's rows are, in the order of the tables."""
    found: dict[str, TablePlace] = {}
    tables = {table.name: table for table in described.tables}
    for group in described.groups:
        first = 0
        for name in group.tables:
            found[name] = TablePlace(tables[name], group, first)
            first += tables[name].rows
    return {name: found[name] for name in tables}


def _matrices(described: _Description) -> list[tuple[TableGroup, tuple[int, int]]]:
    """Return the groups and the shapes of their matrices."""
    rows = {table.name: table.rows for table in described.tables}
    return [
        (group, (sum(rows[name] for name in group.tables), group.dim + LAYOUTS[group.format].extra_columns))
        for group in described.groups
    ]


def _write_rows(
    file: BinaryIO, start: int, name: str, rows: torch.Tensor, row_format: RowFormat, *, chunk_bytes: int
) -> None:
    count = max(1, chunk_bytes // (4 * rows.shape[1]))
    file.seek(start)
    for first in range(0, rows.shape[0], count):
        try:
            stored = encode_rows(rows[first : first + count], row_format)
        except ValueError as error:
            raise ValueError(f"table {name}: {error}") from error
        file.write(stored.numpy().data)


def _check_groups(path: Path, described: _Description) -> None:
    """Check that every table is in one group of its width."""
    tables, groups = {table.name: table for table in described.tables}, described.groups
    held = [name for group in groups for name in group.tables]
    if sorted(held) != sorted(tables) or len({group.name for group in groups}) != len(groups):
        raise BadTableFile(path, f"__metadata__.{_KEY}.groups", "the groups do not hold every table once")
    for group in groups:
        odd = [name for name in group.tables if tables[name].dim != group.dim]
        if odd or not group.tables:
            raise BadTableFile(
                path, f"__metadata__.{_KEY}.groups.{group.name}", f"tables {odd} are not {group.dim} wide"
            )
