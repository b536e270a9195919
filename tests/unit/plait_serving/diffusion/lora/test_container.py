"""Reading safetensors containers: what is damaged, foreign or dangerous is refused in a clear sentence."""

from __future__ import annotations

import gzip
import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora import container

CAP = 1 << 20


def good_file(path: Path) -> Path:
    """A small file with every dtype that is read."""
    tensors = {
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(2, 2, 1, 1).bfloat16(),
        "single": torch.randn(7),
        "double": torch.randn(2).double(),
        "number": torch.tensor(8.0),
        "count": torch.tensor(4),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, path, metadata={"format": "pt", "x": "y"})
    return path


def raw_file(path: Path, table: object, data: bytes = b"") -> Path:
    """A file with a hand-made header."""
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def read(path: Path) -> tuple[container.Header, bytearray]:
    """All of a file."""
    with container.opened(path, max_bytes=CAP) as (header, data):
        return header, data()


def test_reads_what_safetensors_writes(tmp_path):
    """Every tensor comes back bit for bit, with the metadata."""
    from safetensors.torch import load_file

    path = good_file(tmp_path / "a.safetensors")
    header, data = read(path)
    expected = load_file(path)
    assert header.tensors.keys() == expected.keys()
    assert header.metadata == {"format": "pt", "x": "y"}
    for key, value in expected.items():
        got = container.tensor(header, data, key, container.ALPHA_DTYPES)
        assert got.dtype == value.dtype
        assert torch.equal(got, value)


def test_unaligned_tensors_are_read(tmp_path):
    """The format allows any order of dtypes, so a float may begin at an odd byte."""
    wanted = torch.tensor([1.5, -2.0])
    table = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    path = raw_file(tmp_path / "a.safetensors", table, b"\x07" + wanted.numpy().tobytes())
    header, data = read(path)
    assert torch.equal(container.tensor(header, data, "floats"), wanted)


def test_nothing_refers_to_the_file_once_it_is_read(tmp_path):
    """A file that is overwritten and cut in place changes no tensor that was read before."""
    path = good_file(tmp_path / "a.safetensors")
    header, data = read(path)
    before = container.tensor(header, data, "half").clone()
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)
        file.truncate(64)
    assert torch.equal(container.tensor(header, data, "half"), before)


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x05", b"\x1f\x8b", b"\x80\x02\x01"])
def test_a_header_whose_length_looks_like_another_format(tmp_path, start):
    """A file's first bytes are the header's length: 640 of them begin like a pickle, and are none."""
    table = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    padded = table.ljust(int.from_bytes(start, "little"))
    path = raw_file(tmp_path / "a.safetensors", padded, bytes(4))
    assert path.read_bytes().startswith(start)
    assert container.inspect(path, max_bytes=CAP).tensors.keys() == {"a"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"PK\x03\x04" + bytes(60), "can run code"),
        *((pickle.dumps({"a": 1}, protocol), "can run code") for protocol in (2, 3, 4, 5)),
        (pickle.dumps({"a": 1}, 0), "too short|does not fit"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>Not found</html>", "HTML page"),
        (gzip.compress(b"x" * 99, mtime=0), "gzip"),
        (b"GGUF" + bytes(60), "GGUF"),
        (bytes(8), "damaged"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "does not fit"),  # of so much no memory is asked for
    ],
)
def test_other_formats_are_named(tmp_path, content, sentence):
    """Pickles and other files under a .safetensors name are refused by what they are."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(LoraError, match=sentence):
        container.inspect(path, max_bytes=CAP)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("table", "data"),
    [
        (b"[]", b""),
        (b"{not json", b""),
        (b"[" * 100_000, b""),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        ({"a": {**F32, "shape": [-2]}}, bytes(8)),
        ({"a": {**F32, "shape": [2.0]}}, bytes(8)),
        ({"a": {**F32, "shape": [3]}}, bytes(8)),
        ({"a": {**F32, "dtype": "F99"}}, bytes(8)),
        ({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)),
        ({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        ({"a": F32}, bytes(9)),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', bytes(8)),
        ({"__metadata__": ["x"]}, b""),
    ],
    ids=str,
)
def test_damaged_headers_are_refused(tmp_path, table, data):
    """A header that lies about the file raises `LoraError`, whatever the lie."""
    with pytest.raises(LoraError):
        container.inspect(raw_file(tmp_path / "a.safetensors", table, data), max_bytes=CAP)


@pytest.mark.parametrize(
    ("shape", "says"),
    [([10**4299] * 200, "damaged.*out of range"), ([1 << 62] * 40_000, "damaged.*overflow")],
    ids=["long numbers", "many numbers"],
)
def test_sizes_cost_no_more_than_their_text(tmp_path, shape, says):
    """Their product would hold the interpreter for seconds (finding 3): they are refused before it is taken."""
    table = {"a": {**F32, "shape": shape}}
    with pytest.raises(LoraError, match=says):
        container.inspect(raw_file(tmp_path / "a.safetensors", table, bytes(8)), max_bytes=CAP)


def test_missing_files_and_folders_are_refused(tmp_path):
    """What cannot be opened or read is a `LoraError`, not an OSError."""
    with pytest.raises(LoraError, match="cannot be opened"):
        container.inspect(tmp_path / "none.safetensors", max_bytes=CAP)
    with pytest.raises(LoraError):
        container.inspect(tmp_path, max_bytes=CAP)


def test_a_change_while_reading_is_noticed(tmp_path, monkeypatch):
    """Overwritten between header and data, the file is refused instead of mixed."""
    path = good_file(tmp_path / "a.safetensors")
    described = container._described

    def overwrite_first(header):
        with path.open("r+b") as other:
            other.seek(-1, io.SEEK_END)
            other.write(b"\x55\x55")
        return described(header)

    monkeypatch.setattr(container, "_described", overwrite_first)
    with pytest.raises(LoraError, match="changed while"):
        read(path)
