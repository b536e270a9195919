"""Images in and out: formats, limits, transparency, orientation, and the parameters stored in an image."""

from __future__ import annotations

import base64
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from plait_serving.diffusion.errors import RequestError
from plait_serving.images import codec
from plait_serving.images.codec import (
    OutputFormat,
    decode_base64,
    decode_image,
    decode_layers,
    decode_mask,
    encode_image,
    resize,
)
from plait_serving.images.infotext import read_parameters
from support.http_app import saved


@pytest.fixture(autouse=True, scope="module")
def limits():
    """Low ones."""
    with pytest.MonkeyPatch.context() as changed:
        for name, value in {"MAX_BYTES": 100_000, "MAX_PIXELS": 64 * 64, "MAX_EDGE_PX": 128}.items():
            changed.setattr(codec, name, value)
        yield


def noise(height=7, width=5, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def decode(raw, **options):
    return decode_image(raw, param="p", **options)


@pytest.mark.parametrize("output_format", list(OutputFormat))
@pytest.mark.parametrize("quality", [0, 1, 100])
def test_every_quality_of_the_api_encodes(output_format, quality):
    """0 and 100 are valid for every format."""
    assert encode_image(noise(), output_format, quality=quality)


@pytest.mark.parametrize("output_format", list(OutputFormat))
@pytest.mark.parametrize("text", [None, "plain", "Sternchen ä ☃ 🍎, 'x'\nSteps: 4", "é latin"])
def test_parameters_survive_in_every_format(output_format, text):
    """The stored text reads back exactly, whatever its script; where there is none, there is none."""
    assert read_parameters(encode_image(noise(), output_format, parameters=text)) == text


def test_parameters_that_do_not_fit_into_a_jpeg_are_left_out():
    """A JPEG's one EXIF segment is 64 KiB; a longer text costs the text, not the image."""
    text = "x" * 40_000
    raw = encode_image(noise(), OutputFormat.JPEG, parameters=text)
    assert read_parameters(raw) is None
    assert decode(raw).shape == (7, 5, 3)
    for roomy in (OutputFormat.PNG, OutputFormat.WEBP):
        assert read_parameters(encode_image(noise(), roomy, parameters=text)) == text


def test_base64_plain_data_url_and_line_breaks():
    """All the ways in which clients write base64 are understood."""
    raw = bytes(range(256))
    text = base64.b64encode(raw).decode()
    broken = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    for form in (text, broken, f"data:image/png;base64,{text}", f"DATA:image/JPEG;base64,{broken}"):
        assert decode_base64(form, param="p") == raw


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("https://example.com/a.png", "never opened"),
        ("data:image/svg+xml;base64,AAAA", "data URL"),
        ("data:image/png,AAAA", "data URL"),
        ("AAA", "base64"),
        ("AA==AA==", "base64"),
        ("AAA\u00e9", "base64"),
        ("A-_A", "base64"),
        ("A" * 200_000, "larger"),
        (base64.b64encode(bytes(100_001)).decode(), "larger"),
    ],
)
def test_anything_but_base64_is_refused(text, says):
    """Foreign types and broken base64 name the field (`security/test_images` has addresses and paths)."""
    with pytest.raises(RequestError, match=says) as caught:
        decode_base64(text, param="controlnets.0.image")
    assert caught.value.param == "controlnets.0.image"


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused(kind):
    """Only PNG, JPEG and WebP decoders are ever started."""
    with pytest.raises(RequestError, match="not a readable"):
        decode(saved(Image.new("RGB", (16, 16)), kind))


def test_the_largest_allowed_size_passes():
    """The limits are inclusive; what is larger is in `security/test_images`."""
    assert decode(saved(Image.new("RGB", (64, 64)))).shape == (64, 64, 3)
    assert decode(saved(Image.new("RGB", (128, 1)))).shape == (1, 128, 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "LA", "RGBA", "CMYK"])
def test_every_mode_becomes_rgb(mode):
    """Whatever the file's, also a JPEG's for print, the result is uint8 RGB of the same size."""
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = decode(saved(Image.new("RGB", (6, 4), (255, 255, 255)).convert(mode), kind))
    assert image.shape == (4, 6, 3)
    assert image.dtype == np.uint8
    assert (image == 255).all()


def test_sixteen_bit_grey_is_scaled():
    """A 16-bit depth map keeps its greys instead of turning white."""
    ramp = np.linspace(0, 65_535, 16, dtype=np.uint16).reshape(1, 16)
    image = decode(saved(Image.fromarray(ramp)))
    assert np.array_equal(image[0, :, 0], (ramp[0] >> 8).astype(np.uint8))


def test_sixteen_bit_grey_costs_few_bytes_a_pixel(monkeypatch):
    """It took 24 bytes for each in arrays (finding 12): the image itself has 3, its greys 1, and scaling at most 4."""
    raw = saved(Image.fromarray(np.zeros((1000, 1000), dtype=np.uint16)))
    for name, value in {"MAX_PIXELS": 1_000_000, "MAX_EDGE_PX": 1000}.items():
        monkeypatch.setattr(codec, name, value)
    decode_image(raw, param="p")
    tracemalloc.start()
    try:
        decode_image(raw, param="p")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 9_000_000


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_mask_is_what_is_transparent(mode):
    """OpenAI's rule, in every mode that has transparency; half transparent is half of 255."""
    clear = np.array([[255, 0, 128]], np.uint8)
    image = Image.new("RGBA", (3, 1), "white")
    image.putalpha(Image.fromarray(255 - clear))
    raw = saved(image.convert(mode))
    assert np.array_equal(decode_mask(raw, param="p"), clear)
    assert np.array_equal(decode_layers(raw, param="p")[1], clear)


def test_resizing_equals_pillows_lanczos_and_keeps_equal_sizes():
    """Control images are resized exactly as diffusers does; an image of the right size is passed through."""
    image = noise(9, 11)
    expected = np.array(Image.fromarray(image).resize((16, 8), Image.LANCZOS))
    assert np.array_equal(resize(image, width=16, height=8), expected)
    assert resize(image, width=11, height=9) is image


@settings(max_examples=150)
@given(st.sampled_from(["PNG", "JPEG", "WEBP"]), st.data())
def test_a_damaged_file_is_refused_or_decoded_but_never_crashes(kind, data):
    """Whatever bytes are cut or changed, the outcome is an image or a RequestError."""
    raw = bytearray(saved(Image.fromarray(noise(16, 16)), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(1, len(raw)))])
    with suppress(RequestError):
        image = decode(cut)
        assert image.dtype == np.uint8
        assert image.shape[2] == 3


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_a_picture(raw):
    """Random bytes are a RequestError, nothing else."""
    with pytest.raises(RequestError):
        decode(raw)
