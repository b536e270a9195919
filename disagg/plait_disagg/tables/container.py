"""Safetensors files for matrices larger than memory: written in chunks, read by mapping.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header `{name:
{dtype, shape, data_offsets}, "__metadata__": {...}}`, then the tensors without gaps. The library's reader is not
used because it maps writable and private, which the kernel counts against memory as if all pages were written, so
that a table larger than memory is refused. We map read-only, or copy-on-write without that accounting: only pages
that are written to are copied, and processes that map one file share its pages.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from plait_disagg.bounded import load_json, product
from plait_disagg.tables.errors import BadTableFile

_PAGE_BYTES = 4096
"""The alignment of the data, so that rows whose size is a power of two do not straddle pages."""

_READ_AHEAD_BELOW_BYTES = 64 << 20
"""Smaller files are in memory after a few lookups. For a larger one the kernel's read-ahead (8 MiB for each row that
is not cached yet, where it was measured) only evicts other pages: 4,096 rows of a new 20 GB file took 24 s with
it, and 0.03 s without. Warm lookups take the same time with and without."""

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself (MAX_HEADER_SIZE)."""

_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
}
_MAP_NORESERVE = 0x4000
"""From Linux, asm-generic/mman-common.h; Python's mmap has no name for it. With it the kernel does not count a
writable private mapping as if all of its pages were written (vm.overcommit_memory=2 counts it all the same)."""

_SHOWN = 100

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file. `begin` counts from the first byte of the data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Size of its values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A mapped file: tensors by name, which read the file's pages, where each begins in the file, and its stored
    strings.

    `is_writable`: tensors may be written to, visible only to this process.
    """

    tensors: Mapping[str, torch.Tensor]
    starts: Mapping[str, int]
    metadata: Mapping[str, str]
    is_writable: bool = False


@contextmanager
def write_container(
    path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> Iterator[tuple[BinaryIO, Mapping[str, int]]]:
    """Create a file of these tensors, all zeros until written; yield the open file and where in it each tensor starts.

    What is not written stays a hole, which takes no space on disk. The file appears under `path` when the block
    ends, and not at all if it raises.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    starts = {}
    for name, dtype, shape in tensors:
        entry = TensorEntry(name=name, dtype=dtype, shape=shape, begin=end)
        starts[name] = end
        end += entry.nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [entry.begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_BYTES)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            yield file, {name: 8 + len(text) + start for name, start in starts.items()}
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def map_container(path: Path, *, copy_on_write: bool = False, ahead: bool = False) -> Container:
    """Map the file, reading only its header; with `ahead`, read the rest in the background if it fits.

    While the tensors are alive, truncating the file or writing to them makes the kernel kill the process. With
    `copy_on_write` they may be written to, where the system allows it (`Container.is_writable`); the file and other
    processes are unaffected, and each page that is written to (4 KiB) becomes memory of this process.
    Raises `BadTableFile` if the file does not match its header, FileNotFoundError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start, header = _read_header(path, file, size)
        entries = _entries(path, header, size - start)
        metadata = _metadata(path, header)
        mapping, is_writable = _mapped(file, size, copy_on_write=copy_on_write)
    if size >= _READ_AHEAD_BELOW_BYTES:
        mapping.madvise(mmap.MADV_RANDOM)
        if ahead:
            read_ahead(path, mapping)
    tensors = {entry.name: _tensor(mapping, start, entry) for entry in entries}
    starts = {entry.name: start + entry.begin for entry in entries}
    return Container(tensors=tensors, starts=starts, metadata=metadata, is_writable=is_writable)


def _mapped(file: BinaryIO, size: int, *, copy_on_write: bool) -> tuple[mmap.mmap, bool]:
    """Return the mapping and whether it is writable: not if the system counts every page that could be written."""
    if copy_on_write:
        flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            return mmap.mmap(file.fileno(), size, flags=flags, prot=prot), True
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
    return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), False


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Return where the data starts, and the header."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise BadTableFile(
            path, "header length", f"{length} bytes do not fit into a file of {size} (cut short, or not safetensors)"
        )
    try:
        header = load_json(file.read(length), pairs=_unique)
    except (ValueError, RecursionError) as error:
        raise BadTableFile(path, "header", f"not JSON: {error}") from error
    if not isinstance(header, dict):
        raise BadTableFile(path, "header", "not a JSON object")
    return 8 + length, header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _entries(path: Path, header: Mapping[str, Any], data_bytes: int) -> list[TensorEntry]:
    """Return all tensors, which must cover the data without gap or overlap."""
    entries = [_entry(path, name, data) for name, data in header.items() if name != "__metadata__"]
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != end:
            raise BadTableFile(path, f"{entry.name}.data_offsets", f"starts at {entry.begin} where {end} was due")
        end += entry.nbytes
    if end != data_bytes:
        raise BadTableFile(path, "data", f"the tensors take {end} bytes, the file holds {data_bytes} (cut short?)")
    return entries


def _entry(path: Path, name: str, data: Any) -> TensorEntry:
    if not isinstance(data, dict) or data.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadTableFile(path, name, "must have dtype, shape and data_offsets")
    dtype = _DTYPES.get(data["dtype"]) if isinstance(data["dtype"], str) else None
    if dtype is None:
        raise BadTableFile(path, f"{name}.dtype", f"{data['dtype']!r} is none of {', '.join(_DTYPES)}")
    shape, offsets = data["shape"], data["data_offsets"]
    if not _whole_numbers(shape) or not shape or min(shape) < 1:
        raise BadTableFile(path, f"{name}.shape", f"{_listed(shape)} is not a list of sizes of at least 1")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise BadTableFile(path, f"{name}.data_offsets", f"{_listed(offsets)} is not a begin and an end")
    if offsets[1] - offsets[0] != product(shape, limit=offsets[1]) * dtype.itemsize:
        raise BadTableFile(path, f"{name}.data_offsets", f"{offsets!r} does not hold {_listed(shape)} of {dtype}")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0])


def _listed(value: Any) -> str:
    return repr(value) if len(repr(value)) <= _SHOWN else repr(value)[:_SHOWN] + " ..."


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _metadata(path: Path, header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadTableFile(path, "__metadata__", "must be an object of strings")
    return metadata


def _tensor(mapping: mmap.mmap, start: int, entry: TensorEntry) -> torch.Tensor:
    """Return a tensor on the mapping's pages; it keeps the mapping alive."""
    with warnings.catch_warnings():
        # "The given buffer is not writable": that is the point.
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.frombuffer(mapping, dtype=entry.dtype, count=math.prod(entry.shape), offset=start + entry.begin)
    return flat.view(entry.shape)


_SHARE = 0.5
"""The max file size as a share of the available memory: a larger file would evict what others need."""

_READ_BYTES = 8 << 20
_MAP_BYTES = 1 << 20
"""How much is mapped at once: little, because Python holds the GIL while the kernel maps pages."""

_MADV_POPULATE_READ = 22
"""From Linux 5.14, asm-generic/mman-common.h: populates pages as if each had been read."""


def read_ahead(path: Path, mapping: mmap.mmap) -> threading.Thread | None:
    """Read the file and map its pages on a separate thread, which is returned; None if the file is too large.

    A newly started server would spend its first seconds under load on page faults, which bring in one page each, and on
    the disk where the file is not in the page cache.
    """
    if len(mapping) > _SHARE * available_bytes():
        return None
    thread = threading.Thread(target=_read, args=(path, mapping), name=f"read ahead {path.name}", daemon=True)
    thread.start()
    return thread


def available_bytes() -> int:
    """Return the bytes of memory available without swapping according to /proc/meminfo; 0 where it does not exist."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split(":", 1) for line in lines)
    return 1024 * int(found.get("MemAvailable", "0 kB").split()[0])


def _read(path: Path, mapping: mmap.mmap) -> None:
    """Read the file, best effort: if anything fails here, lookups read for themselves."""
    room = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(mapping), _READ_BYTES):
                os.preadv(file.fileno(), [room], start)
                for part in range(start, min(start + _READ_BYTES, len(mapping)), _MAP_BYTES):
                    mapping.madvise(_MADV_POPULATE_READ, part, min(_MAP_BYTES, len(mapping) - part))
    except (OSError, ValueError):
        return
