"""Safetensors files for matrices larger than memory: written in chunks, read by mapping.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header `{name:
{dtype, shape, data_offsets}, "__metadata__": {...}}`, then the tensors without gaps. The library reads the header. Its
tensors are not used because torch maps them writable and private, which the kernel counts against memory as if all
pages were written, so that a table larger than memory is refused. We map read-only, or copy-on-write without that
accounting: only pages that are written to are copied, and processes that map one file share its pages.
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

import psutil
import torch
from safetensors import SafetensorError, safe_open

_PAGE_BYTES = 4096
"""The alignment of the data, so that rows whose size is a power of two do not straddle pages."""

_READ_AHEAD_BELOW_BYTES = 64 << 20
"""Smaller files are in memory after a few lookups. For a larger one the kernel's read-ahead (8 MiB for each row that
is not cached yet, where it was measured) only evicts other pages: 4,096 rows of a new 20 GB file took 24 s with
it, and 0.03 s without. Warm lookups take the same time with and without."""

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

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}


class BadTableFile(Exception):
    """A file is not one of our table files, or not a complete one; `field` names the part of it that is wrong."""

    def __init__(self, path: Path, field: str, why: str) -> None:
        super().__init__(f"{path}: {field}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A mapped file: tensors by name, which read the file's pages, where each begins in the file, its stored strings,
    and the mapping.

    `is_writable`: tensors may be written to, visible only to this process.
    """

    tensors: Mapping[str, torch.Tensor]
    starts: Mapping[str, int]
    metadata: Mapping[str, str]
    mapping: mmap.mmap
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
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
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


def map_container(path: Path, *, copy_on_write: bool = False) -> Container:
    """Map the file, reading only its header.

    While the tensors are alive, truncating the file or writing to them makes the kernel kill the process. With
    `copy_on_write` they may be written to, where the system allows it (`Container.is_writable`); the file and other
    processes are unaffected, and each page that is written to (4 KiB) becomes memory of this process.
    Raises `BadTableFile` if the file does not match its header, FileNotFoundError.
    """
    with path.open("rb") as file:
        size, start = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
        entries, metadata = _described(path, file)
        mapping, is_writable = _mapped(file, size, copy_on_write=copy_on_write)
    if size >= _READ_AHEAD_BELOW_BYTES:
        mapping.madvise(mmap.MADV_RANDOM)
    tensors, starts = {}, {}
    for name, (dtype, shape) in entries.items():
        starts[name], tensors[name] = start, _tensor(mapping, start, dtype, shape)
        start += tensors[name].nbytes
    return Container(tensors=tensors, starts=starts, metadata=metadata, mapping=mapping, is_writable=is_writable)


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


def _described(path: Path, file: BinaryIO) -> tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], dict[str, str]]:
    """Return dtype and shape of the tensors, which follow each other without gaps, and the stored strings."""
    found = {}
    try:
        # The open file, which another may have replaced at its path; mapped for reading only.
        with safe_open(f"/proc/self/fd/{file.fileno()}", framework="np") as header:
            for name in header.offset_keys():
                part = header.get_slice(name)
                found[name] = part.get_dtype(), tuple(part.get_shape())
            metadata = header.metadata() or {}
    except SafetensorError as error:
        raise BadTableFile(path, "header", f"{error} (cut short, or not safetensors)") from error
    for name, (dtype, shape) in found.items():
        if dtype not in _DTYPES:
            raise BadTableFile(path, f"{name}.dtype", f"{dtype} is none of {', '.join(_DTYPES)}")
        if not shape or min(shape) < 1:
            raise BadTableFile(path, f"{name}.shape", f"{list(shape)} is not a list of sizes of at least 1")
    return {name: (_DTYPES[dtype], shape) for name, (dtype, shape) in found.items()}, metadata


def _tensor(mapping: mmap.mmap, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor on the mapping's pages; it keeps the mapping alive."""
    with warnings.catch_warnings():
        # "The given buffer is not writable": that is the point.
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=start)
    return flat.view(shape)


_SHARE = 0.5
"""The max file size as a share of the available memory: a larger file would evict what others need."""

_READ_BYTES = 8 << 20
_MAP_BYTES = 1 << 20
"""How much is mapped at once: little, because Python holds the GIL while the kernel maps pages."""

_MADV_POPULATE_READ = 22
"""From Linux 5.14, asm-generic/mman-common.h: populates pages as if each had been read."""


def read_ahead(path: Path, mapping: mmap.mmap) -> threading.Thread | None:
    """Read the file and map its pages on a separate thread, which is returned; None if the file is too large, or so
    small that lookups have soon read it.

    A newly started server would spend its first seconds under load on page faults, which bring in one page each, and on
    the disk where the file is not in the page cache.
    """
    if not _READ_AHEAD_BELOW_BYTES <= len(mapping) <= _SHARE * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_read, args=(path, mapping), name=f"read ahead {path.name}", daemon=True)
    thread.start()
    return thread


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
