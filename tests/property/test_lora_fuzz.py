"""Damaged LoRA files: whatever the bytes, a `LoraError` or a sound LoRA, never another exception and never NaN."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.formats import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from support.loras import TwoLayers, factors, kohya_tensors, peft_tensors, shapes_of, write

torch.set_num_threads(1)

TARGETS = LoraTargets.of({"unet": TwoLayers()})
MADE = factors(shapes_of(TwoLayers()))
QUICK = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check(folder: Path, content: bytes) -> bool:
    """Whether the content is a LoRA; a sound one if it is."""
    path = folder / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        got = parse("fuzzed", path, TARGETS, max_bytes=1 << 20)
    except LoraError:
        return False
    for ref, factor in got.factors.items():
        assert (factor.up.shape[0], factor.down.shape[1]) == (
            TARGETS.shapes[ref][0],
            math.prod(TARGETS.shapes[ref][1:]),
        )
        assert torch.isfinite(factor.up).all()
        assert torch.isfinite(factor.down).all()
        assert math.isfinite(factor.alpha)
    return True


@pytest.fixture(scope="module", params=[peft_tensors, kohya_tensors], ids=["peft", "kohya"])
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound file's bytes."""
    folder = tmp_path_factory.mktemp("good")
    content = write(folder / "good.safetensors", request.param(MADE), dtype=torch.float16).read_bytes()
    assert check(folder, content)
    return content


@QUICK
@given(content=st.binary(max_size=200), length=st.integers(0, 64))
def test_any_bytes(tmp_path, content, length):
    """Noise, with and without a plausible header length, is refused."""
    assert not check(tmp_path, content)
    assert not check(tmp_path, length.to_bytes(8, "little") + content)


@QUICK
@given(data=st.data())
def test_flipped_bytes(tmp_path, good, data):
    """A few changed bytes anywhere, mostly in the header."""
    spoilt = bytearray(good)
    header_end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        end = data.draw(st.sampled_from([header_end, len(good)]))
        spoilt[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    check(tmp_path, bytes(spoilt))


@QUICK
@given(data=st.data())
def test_cut_and_grown_files(tmp_path, good, data):
    """Every cut and every addition is noticed."""
    cut = data.draw(st.integers(0, len(good) - 1))
    assert not check(tmp_path, good[:cut])
    assert not check(tmp_path, good + data.draw(st.binary(min_size=1, max_size=9)))
