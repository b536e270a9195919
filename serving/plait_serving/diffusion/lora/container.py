"""The safetensors container: header first, then the tensors in one read into our own memory.

The library reads the header, of a copy. Not the file itself, nor its tensors: it maps files, so a LoRA that is
overwritten in its folder would change under a running request, or kill the process with SIGBUS. Here nothing refers to
the file once it is read. Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON,
data).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from plait_serving.diffusion.errors import LoraError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 16 << 20
"""The SDXL LoRA with the most keys that we know of has 1972 tensors, some 300 KB of header."""

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
    with opened(path, max_bytes=max_bytes) as (header, _):
        return header


@contextmanager
def opened(path: Path, *, max_bytes: int) -> Iterator[tuple[Header, Callable[[], bytearray]]]:
    """Open a file; give its header, checked, and what reads its data. Raises `LoraError`, also then if the file has
    changed meanwhile."""
    with _open(path) as file:
        opened_as = _state(file)
        header = _read_header(file, max_bytes)

        def data() -> bytearray:
            read = bytearray(header.file_bytes - header.data_start)
            file.seek(header.data_start)
            _fill(file, read)
            if _state(file) != opened_as:
                raise LoraError("the file changed while it was read")
            return read

        yield header, data


def tensor(header: Header, data: bytearray, key: str, dtypes: Mapping[str, str] = DTYPES) -> torch.Tensor:
    """Return a view of `data`. Raises `LoraError` for another dtype."""
    import torch

    info = header.tensors[key]
    if info.dtype not in dtypes:
        raise LoraError(f"{key} is {info.dtype}; LoRA weights must be F16, BF16, F32 or F64")
    dtype = getattr(torch, dtypes[info.dtype])
    if info.begin == info.end:
        return torch.empty(info.shape, dtype=dtype)
    aligned = info.begin % dtype.itemsize == 0
    piece, offset = (data, info.begin) if aligned else (data[info.begin : info.end], 0)
    return torch.frombuffer(piece, dtype=dtype, count=math.prod(info.shape), offset=offset).view(info.shape)


def _state(file: BufferedReader) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_mtime_ns, stat.st_size


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
    data_start = 8 + int.from_bytes(start[:8], "little")
    if data_start > min(8 + MAX_HEADER_BYTES, file_bytes):
        raise LoraError("the file is no safetensors file, or it is cut off: its header does not fit in it")
    raw = bytearray(data_start)
    file.seek(0)
    _fill(file, raw)
    # In memory, and as long as the file, but a hole where the data would be: the library maps it, and reads its header.
    with os.fdopen(os.memfd_create("header"), "wb") as copy:
        copy.write(raw)
        copy.truncate(file_bytes)  # which writes what was buffered
        tensors, metadata = _described(Path(f"/proc/self/fd/{copy.fileno()}"))
    return Header(tensors=tensors, metadata=metadata, data_start=data_start, file_bytes=file_bytes)


def _described(path: Path) -> tuple[Mapping[str, TensorInfo], Mapping[str, str]]:
    """Return the tensors, which follow each other without gaps, and the metadata. Raises `LoraError`."""
    tensors: dict[str, TensorInfo] = {}
    begin = 0
    try:
        with safe_open(path, framework="np") as found:
            for key in found.offset_keys():
                part = found.get_slice(key)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                if dtype not in _ITEM_BYTES:
                    raise LoraError(f"{key} has the unknown dtype {dtype}")
                end = begin + math.prod(shape) * _ITEM_BYTES[dtype]
                tensors[key] = TensorInfo(dtype=dtype, shape=shape, begin=begin, end=end)
                begin = end
            metadata = found.metadata() or {}
    except SafetensorError as error:
        raise LoraError(f"the safetensors header is damaged, or the file is cut off ({error})") from error
    return MappingProxyType(tensors), MappingProxyType(metadata)


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
