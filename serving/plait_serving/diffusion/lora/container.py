"""The safetensors container: header first, then the tensors in one read into our own memory.

Why not `safetensors.torch.load_file`: its tensors are views of a memory-mapped file, so a LoRA that is overwritten
in its folder would change under a running request, or kill the process with SIGBUS. Here nothing refers to the file
once it is read. Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON, data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from plait_serving.diffusion.errors import LoraError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 16 << 20
"""The SDXL LoRA with the most keys that we know of has 1972 tensors, some 300 KB of header."""

MAX_DIGITS = 19
"""Of an integer: 2^63 has as many. Every size and offset of a file fits, and Python's integers have no largest one: the
product of a few hundred of 4,300 digits holds the interpreter for minutes."""

DTYPES: Mapping[str, str] = MappingProxyType({"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"})
"""The permitted dtypes of a LoRA's tensors, in torch's words: headers are read without it. Alphas are sometimes stored
as integers, see `ALPHA_DTYPES`."""

ALPHA_DTYPES: Mapping[str, str] = MappingProxyType({**DTYPES, "I64": "int64", "I32": "int32"})

_ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

# Other things that people put under a .safetensors name, by their first bytes.
_MAGIC: tuple[tuple[tuple[bytes, ...], str], ...] = (
    ((b"PK\x03\x04",), "a zip archive, as torch.save writes it: a pickle, which can run code when it is loaded"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle, which can run code when it is loaded"),
    ((b"version https://git-lfs",), "a Git LFS pointer: the real file was not downloaded"),
    ((b"<!DOCTYPE", b"<html"), "an HTML page: the download went wrong"),
    ((b"GGUF",), "a GGUF file"),
    ((b"\x1f\x8b",), "a gzip archive"),
    ((b"\x89HDF",), "an HDF5 file"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a header. `begin` and `end` are byte offsets into the data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A file's header. `data_start` and `file_bytes` count from the file's first byte."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int
    file_bytes: int


def inspect(path: Path, *, max_bytes: int) -> Header:
    """Read and check only the header. Raises `LoraError`."""
    with _open(path) as file:
        return _read_header(file, max_bytes)


def read(path: Path, *, max_bytes: int) -> tuple[Header, bytearray]:
    """Return the header and the data, from one open file. Raises `LoraError`, also if the file changed meanwhile."""
    with _open(path) as file:
        before = os.fstat(file.fileno())
        header = _read_header(file, max_bytes)
        data = bytearray(header.file_bytes - header.data_start)
        file.seek(header.data_start)
        _fill(file, data)
        after = os.fstat(file.fileno())
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise LoraError("the file changed while it was read")
    return header, data


def tensor(header: Header, data: bytearray, key: str) -> torch.Tensor:
    """Return a view of `data`. Raises `LoraError` for a dtype that is not a float (or an alpha's integer)."""
    import torch

    info = header.tensors[key]
    if info.dtype not in ALPHA_DTYPES:
        raise LoraError(f"{key} is {info.dtype}; LoRA weights must be F16, BF16, F32 or F64")
    dtype = getattr(torch, ALPHA_DTYPES[info.dtype])
    if info.begin == info.end:
        return torch.empty(info.shape, dtype=dtype)
    aligned = info.begin % dtype.itemsize == 0
    piece, offset = (data, info.begin) if aligned else (data[info.begin : info.end], 0)
    return torch.frombuffer(piece, dtype=dtype, count=math.prod(info.shape), offset=offset).view(info.shape)


def load_json(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON of strangers; `pairs` makes the objects, as `object_pairs_hook` does. Raises ValueError, also for an
    integer of more than `MAX_DIGITS` digits, and RecursionError."""
    return json.loads(text, parse_int=_integer, object_pairs_hook=pairs)


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"the integer {digits[:MAX_DIGITS]}... has {len(digits)} digits")
    return int(digits)


def product(sizes: Iterable[int], *, limit: int) -> int:
    """Return the product of sizes of at least 0, or `limit + 1` if it is larger."""
    result, is_larger = 1, False
    for size in sizes:
        if size == 0:
            return 0
        if not is_larger:
            result *= size
            is_larger = result > limit
    return limit + 1 if is_larger else result


def _open(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise LoraError(f"the file cannot be opened ({error.strerror})") from error


def _read_header(file: BufferedReader, max_bytes: int) -> Header:
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes > max_bytes:
        raise LoraError(f"the file has {file_bytes} bytes; the largest allowed is {max_bytes}")
    start = file.read(32)
    _refuse_other_formats(start)
    if len(start) < 8:
        raise LoraError("the file is too short for a safetensors file")
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise LoraError("the file is no safetensors file, or it is cut off: its header does not fit in it")
    raw = bytearray(header_bytes)
    file.seek(8)
    _fill(file, raw)
    tensors, metadata = _decode(raw, file_bytes - 8 - header_bytes)
    return Header(tensors=tensors, metadata=metadata, data_start=8 + header_bytes, file_bytes=file_bytes)


def _refuse_other_formats(start: bytes) -> None:
    # A header of 640 bytes begins like a pickle of protocol 2; only a safetensors file has its brace there.
    if start[4:9] == b"\0\0\0\0{":
        return
    for magic, what in _MAGIC:
        if start.startswith(magic):
            raise LoraError(f"the file is {what}; only safetensors files are read")


def _fill(file: BufferedReader, buffer: bytearray) -> None:
    if file.readinto(buffer) < len(buffer):
        raise LoraError("the file is cut off")


def _decode(raw: bytearray, data_bytes: int) -> tuple[Mapping[str, TensorInfo], Mapping[str, str]]:
    try:
        table = load_json(raw.decode("utf-8"), pairs=_no_duplicates)
        if not isinstance(table, dict):
            raise TypeError("not an object")
        metadata = table.pop("__metadata__", None) or {}
        tensors = {key: _info(entry) for key, entry in table.items()}
        metadata = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LoraError(f"the safetensors header is damaged ({error})") from error
    _check_layout(tensors, data_bytes)
    return MappingProxyType(tensors), MappingProxyType(metadata)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def _info(entry: dict[str, object]) -> TensorInfo:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise TypeError("an entry lacks dtype, shape or offsets")
    numbers = [*shape, *offsets]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("shapes and offsets must be whole numbers")
    return TensorInfo(dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _check_layout(tensors: Mapping[str, TensorInfo], data_bytes: int) -> None:
    """Check that tensors are contiguous, without gap or overlap, and end with the file, as the format requires."""
    position = 0
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        item_bytes = _ITEM_BYTES.get(info.dtype)
        if item_bytes is None:
            raise LoraError(f"{key} has the unknown dtype {info.dtype}")
        if info.begin != position or info.end - info.begin != product(info.shape, limit=data_bytes) * item_bytes:
            raise LoraError(f"the safetensors header is damaged: {key} does not lie where it should")
        position = info.end
    if position != data_bytes:
        raise LoraError("the file is cut off, or something was appended: its data does not end where the header says")
