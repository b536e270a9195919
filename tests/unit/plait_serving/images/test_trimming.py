"""What of a file reaches a decoder: the pixels of the first frame and which way up they are, and no more than so many
passes over them."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from plait_serving.diffusion.errors import RequestError
from plait_serving.images import codec
from plait_serving.images.codec import decode_image, decode_mask, image_size
from plait_serving.images.trimming import MAX_CHUNKS, MAX_SCANS, SEARCHED_BYTES, trimmed
from support.http_app import png_chunk, saved

XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def noise(width: int = 24, height: int = 16) -> Image.Image:
    pixels = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def with_png_chunks(*chunks: bytes, image: Image.Image | None = None, behind: bool = False) -> bytes:
    """A PNG with more chunks before its pixels, or behind them."""
    raw = saved(image or noise(), "PNG")
    at = raw.index(b"IEND" if behind else b"IDAT") - 4
    return raw[:at] + b"".join(chunks) + raw[at:]


def with_segments(*segments: bytes) -> bytes:
    """A JPEG with more segments behind its first."""
    raw = saved(noise(), "JPEG")
    at = raw.index(b"\xff\xdb")
    return raw[:at] + b"".join(segments) + raw[at:]


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes again until there are that many."""
    raw = saved(noise().convert("L"), "JPEG", progressive=True)
    at = raw.rindex(b"\xff\xda")
    assert raw.endswith(b"\xff\xd9")
    return raw[:-2] + raw[at:-2] * (count - raw.count(b"\xff\xda")) + b"\xff\xd9"


def animated(kind: str, frames: int) -> bytes:
    """An animation whose second frame comes again until there are that many."""
    raw = saved(noise(), kind, save_all=True, append_images=[ImageOps.invert(noise())])
    if kind == "WEBP":
        at = raw.index(b"ANMF", raw.index(b"ANMF") + 4)
        raw += raw[at:] * (frames - 2)
        return raw[:4] + struct.pack("<I", len(raw) - 8) + raw[8:]
    at, end = raw.rindex(b"fcTL") - 4, raw.index(b"IEND") - 4
    return raw[:end] + raw[at:end] * (frames - 2) + raw[end:]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that Pillow was given."""
    files: list[bytes] = []
    opens = Image.open

    def open_noted(file: io.BytesIO, **options: object) -> Image.Image:
        files.append(file.getvalue())
        return opens(file, **options)

    monkeypatch.setattr(codec.Image, "open", open_noted)
    return files


HOSTILE = {
    "scans": (lambda: with_scans(MAX_SCANS + 1), f"the JPEG has {MAX_SCANS + 1} scans; at most {MAX_SCANS} are read"),
    "texts": (lambda: with_png_chunks(*[png_chunk(b"tEXt", b"a\0b")] * MAX_CHUNKS), "chunks"),
    "texts behind": (lambda: with_png_chunks(*[png_chunk(b"tEXt", b"a\0b")] * MAX_CHUNKS, behind=True), "chunks"),
    "empty pieces": (lambda: with_png_chunks(*[png_chunk(b"IDAT", b"")] * MAX_CHUNKS), "chunks"),
    "segments": (lambda: with_segments(*[segment(0xE1, b"Exif\0\0")] * MAX_CHUNKS), "chunks"),
    "tables": (lambda: with_segments(*[segment(0xDD, b"\0\0")] * MAX_CHUNKS), "chunks"),
    "frames of a WebP": (lambda: animated("WEBP", MAX_CHUNKS), "chunks or frames"),
    "frames of a PNG": (lambda: animated("PNG", MAX_CHUNKS), "chunks or frames"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_declares_too_much_work_never_reaches_a_decoder(name: str, given: list[bytes]) -> None:
    """1,000 repeated scans of 94 KB took 35 s, 900,000 texts 41 s: refused by what there is too much of."""
    make, says = HOSTILE[name]
    raw = make()
    for read in (decode_image, image_size):
        with pytest.raises(RequestError, match=says) as caught:
            read(raw, param="controlnets.0.image")
        assert caught.value.param == "controlnets.0.image"
    assert given == []


def test_no_more_chunks_are_looked_at_than_are_allowed() -> None:
    """However many there are: of each its length, its kind and its bytes."""
    looks = 0

    class File(bytes):
        def __getitem__(self, part: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(part)

    with pytest.raises(RequestError):
        trimmed(File(with_png_chunks(*[png_chunk(b"tEXt", b"a\0b")] * 900_000)), param="p")
    assert MAX_CHUNKS < looks <= 3 * (MAX_CHUNKS + 1)


def test_as_many_scans_as_are_allowed_are_read(given: list[bytes]) -> None:
    """And those that encoders write are far fewer."""
    raw = with_scans(MAX_SCANS)
    image = decode_image(raw, param="p")
    assert given[0].count(b"\xff\xda") == MAX_SCANS
    assert np.array_equal(image, np.array(Image.open(io.BytesIO(raw)).convert("RGB")))
    for subsampling in (0, 1, 2):
        raw = saved(noise(200, 100), "JPEG", progressive=True, subsampling=subsampling)
        assert raw.count(b"\xff\xda") <= MAX_SCANS / 3


BOMB = zlib.compress(bytes(1 << 20), 9)
UNREAD = {
    "zTXt": lambda: with_png_chunks(*[png_chunk(b"zTXt", b"a\0\0" + BOMB)] * 50),
    "iTXt": lambda: with_png_chunks(*[png_chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB)] * 50),
    "iCCP": lambda: with_png_chunks(png_chunk(b"iCCP", b"a\0\0" + BOMB)),
    "private": lambda: with_png_chunks(*[png_chunk(b"abCd", bytes(100))] * 1000),
    "long EXIF of a PNG": lambda: with_png_chunks(png_chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + bytes(786_420))),
    "EXIF again and again": lambda: with_segments(*[segment(0xE1, b"Exif\0\0" + bytes(60_000))] * 20),
    "JPEG's profile": lambda: with_segments(*[segment(0xE2, b"ICC_PROFILE\0" + bytes([i, 9, 0])) for i in range(9)]),
    "comments": lambda: with_segments(*[segment(0xFE, b"x" * 60_000)] * 100),
    "junk": lambda: with_segments(bytes(100_000)),
    "another image behind": lambda: with_segments() + saved(noise(), "JPEG"),
    "frames": lambda: animated("WEBP", 50),
    "frames of a PNG": lambda: animated("PNG", 50),
    "WebP's profile": lambda: saved(noise(), "WEBP", icc_profile=bytes(100_000), lossless=True),
    "long EXIF of a WebP": lambda: saved(noise(), "WEBP", exif=b"MM\0*\0\0\0\x08\0\0" + bytes(100_000), lossless=True),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_pixels_do_not_depend_on_is_not_read(name: str, given: list[bytes]) -> None:
    """Whatever it costs to unpack: the decoder is given a file that is no longer than the same image without it."""
    raw = UNREAD[name]()
    image = decode_image(raw, param="p")
    kind = "WEBP" if raw[:4] == b"RIFF" else "PNG" if raw[:4] == b"\x89PNG" else "JPEG"
    plain = saved(noise(), kind, **({"lossless": True} if kind == "WEBP" else {}))
    (file,) = given
    # An animation has a head of 18 and 14 bytes, 16 about its frame, and WebP's own choice of how to encode it.
    assert len(file) <= max(len(plain), 70_000 if "again" in name else 0) + (1000 if "frames" in name else 64)
    assert np.array_equal(image, np.array(Image.open(io.BytesIO(raw)).convert("RGB")))


KINDS = [
    *[("PNG", mode, {}) for mode in ("1", "L", "P", "RGB", "LA", "RGBA", "I;16")],
    *[("JPEG", mode, options) for mode in ("L", "RGB", "CMYK")
      for options in ({}, {"progressive": True}, {"restart_marker_blocks": 2}, {"keep_rgb": True})],
    *[("WEBP", mode, options) for mode in ("RGB", "RGBA") for options in ({}, {"lossless": True}, {"quality": 20})],
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode", "options"), KINDS, ids=str)
def test_an_image_of_every_kind_is_the_same_without_its_notes(kind: str, mode: str, options: dict[str, object]) -> None:
    """Palettes, transparency and WebP's alpha in a chunk of its own are pixels, too; Adobe's and JFIF's segments say
    what the components are; restarts stay where they are."""
    depths = Image.fromarray(np.arange(384, dtype=np.uint16).reshape(16, 24))
    image = depths if mode == "I;16" else noise().convert(mode)
    if mode == "P":
        image.info["transparency"] = 3
    if mode == "RGBA":
        image.putalpha(noise().convert("L"))
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "x" * 1000)
    notes = {"PNG": {"pnginfo": info, "dpi": (72, 72)}, "JPEG": {"comment": b"x" * 1000}, "WEBP": {}}[kind]
    raw = saved(image, kind, icc_profile=bytes(70_000), **notes, **options)
    short, _ = trimmed(raw, param="p")
    assert len(short) <= len(raw) - (1000 if kind == "PNG" else 70_000)  # a PNG's profile is compressed
    with Image.open(io.BytesIO(raw)) as whole, Image.open(io.BytesIO(short)) as part:
        assert (part.mode, part.info.get("transparency")) == (whole.mode, whole.info.get("transparency"))
        assert part.tobytes() == whole.tobytes()


def turned(kind: str, note: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    if note == "exif":
        return saved(noise(), kind, exif=exif)
    if kind == "PNG":
        return with_png_chunks(png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP))
    return saved(noise(), kind, xmp=XMP)


@pytest.mark.parametrize("note", ["exif", "xmp"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_is_upright_whichever_note_says_how_it_lies(kind: str, note: str) -> None:
    """As Pillow turns the whole file."""
    raw = turned(kind, note)
    with Image.open(io.BytesIO(raw)) as whole:
        expected = np.array(ImageOps.exif_transpose(whole).convert("RGB"))
    assert expected.shape == (24, 16, 3)
    assert np.array_equal(decode_image(raw, param="p"), expected)
    assert image_size(raw, param="p") == (16, 24)
    assert decode_mask(raw, param="p").shape == (24, 16)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_orientation_is_pillows(orientation: int, order: str) -> None:
    """In either order of bytes, behind other entries; numbers that mean nothing turn nothing."""
    entries = [(0x10F, 2, 4, b"abc\0"), (0x112, 3, 1, struct.pack(order + "HH", orientation, 0))]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(entries))
    exif = head + b"".join(struct.pack(order + "HHI", *entry[:3]) + entry[3] for entry in entries) + bytes(4)
    for raw in (
        with_segments(segment(0xE1, b"Exif\0\0" + exif)),
        with_png_chunks(png_chunk(b"eXIf", exif), behind=True),
    ):
        with Image.open(io.BytesIO(raw)) as whole:
            expected = np.array(ImageOps.exif_transpose(whole).convert("RGB"))
        assert np.array_equal(decode_image(raw, param="p"), expected)
        assert image_size(raw, param="p") == expected.shape[1::-1]


def test_broken_exif_leaves_nothing_behind(recwarn: pytest.WarningsRecorder) -> None:
    """Pillow warned of each entry, in words that Python keeps for ever."""
    entries = b"".join(struct.pack("<HHII", tag, 2, 60_000 + tag, 8) for tag in range(1, 5000))
    exif = b"II*\0" + struct.pack("<IH", 8, 4999) + entries
    for raw in (with_segments(segment(0xE1, b"Exif\0\0" + exif)), with_png_chunks(png_chunk(b"eXIf", exif))):
        assert decode_image(raw, param="p").shape == (16, 24, 3)
    assert len(recwarn) == 0


def test_an_arithmetic_jpeg_is_no_image() -> None:
    """A pass over such codes costs many times as much as one over Huffman's."""
    raw = saved(noise(), "JPEG")
    for marker in (b"\xff\xc9", b"\xff\xca"):
        with pytest.raises(RequestError, match="not a readable"):
            decode_image(raw.replace(b"\xff\xc0", marker, 1), param="p")


@pytest.mark.parametrize("length", range(-12, 1))
def test_a_marker_across_two_searches_is_found(length: int) -> None:
    """Long data are searched in pieces, between which other threads run."""
    coded = b"\xff\xda\0\2" + bytes(SEARCHED_BYTES + length) + b"\xff\0\xff\xd1\1\1\1\xff\xff\0"
    raw = b"\xff\xd8" + coded * 3 + b"\xff\xfe\0\4xx" + coded + b"\xff\xd9" + coded
    assert trimmed(raw, param="p") == (b"\xff\xd8" + coded * 4 + b"\xff\xd9", 1)


def test_other_bytes_are_left_to_those_who_refuse_them() -> None:
    """A file of another format, and a sound in the same container."""
    for raw in (b"", b"GIF89a" + bytes(100), b"BM"):
        assert trimmed(raw, param="p") == (raw, 1)
    with pytest.raises(RequestError, match="not a readable"):
        decode_image(b"RIFF" + struct.pack("<I", 2**31) + b"WAVEfmt " + bytes(64), param="p")
