"""Damaged LoRA files: whatever the bytes, a `LoraError` or a sound LoRA, never another exception and never NaN."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from support.loras import TwoLayers, factors, kohya_tensors, lycoris_tensors, peft_tensors, shapes_of, write

torch.set_num_threads(1)

TARGETS = LoraTargets.of({"unet": TwoLayers()})
MADE = factors(shapes_of(TwoLayers()))
QUICK = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check(folder: Path, content: bytes) -> bool:
    """Whether the content is a LoRA; a sound one if it is."""
    path = folder / "fuzzed.safetensors"
    path.write_bytes(content)
    try:
        got = parse("fuzzed", path, TARGETS, max_bytes=1 << 20)
    except LoraError:
        return False
    for ref, factor in got.factors.items():
        shape = TARGETS.shapes[ref]
        assert factor.shape == (shape[0], math.prod(shape[1:]))
        product = factor.product(torch.empty(0, dtype=torch.float64))
        assert product.shape == factor.shape
        assert torch.isfinite(product).all()
        assert float(product.abs().max()) <= factor.bound
        assert math.isfinite(factor.alpha)
    return True


GOOD = {"peft": peft_tensors(MADE), "kohya": kohya_tensors(MADE)} | {
    kind: lycoris_tensors(TwoLayers(), kind) for kind in ("loha", "lokr", "dora")
}


@pytest.fixture(scope="module", params=list(GOOD))
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A sound file's bytes."""
    folder = tmp_path_factory.mktemp("good")
    content = write(folder / "good.safetensors", GOOD[request.param], dtype=torch.float16).read_bytes()
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
def test_damaged_files(tmp_path, good, data):
    """A few changed bytes anywhere, mostly in the header; and every cut and every addition is noticed."""
    spoilt = bytearray(good)
    header_end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        end = data.draw(st.sampled_from([header_end, len(good)]))
        spoilt[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    check(tmp_path, bytes(spoilt))
    assert not check(tmp_path, good[: data.draw(st.integers(0, len(good) - 1))])
    assert not check(tmp_path, good + data.draw(st.binary(min_size=1, max_size=9)))
