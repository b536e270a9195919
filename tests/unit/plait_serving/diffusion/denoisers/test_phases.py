"""Doubling by phases against diffusers' `Upsample2D`, and where it is used."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.upsampling import Upsample2D
from torch import nn

from plait_serving.diffusion.denoisers.computations import vae_computation
from plait_serving.diffusion.denoisers.phases import PhasedUpsample, phased
from support.tiny import seeded


def upsample(**options: object) -> Upsample2D:
    """A seeded one of 6 to 5 channels."""
    with seeded(0):
        return Upsample2D(6, **{"use_conv": True, "out_channels": 5, **options}).eval()


def difference(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> float:
    """The largest difference of their outputs, which have one shape."""
    found, wanted = ours(x), theirs(x)
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 1, 5), (3, 4, 7), (1, 8, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_convolution_of_the_doubled_image(size, bias):
    """On odd shapes, to the borders."""
    rows, high, wide = size
    theirs, x = upsample(bias=bias), torch.randn(rows, 6, high, wide)
    assert difference(phased(theirs), theirs, x) < 1e-6


@torch.no_grad()
def test_kernels_of_float16_are_added_in_float32():
    """As an executor computes them: no sum is rounded to float16."""
    theirs, x = upsample().half(), torch.randn(2, 6, 3, 3)
    assert difference(phased(theirs), upsample().half().float(), x) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"use_conv": False, "out_channels": 6},
        {"norm_type": "rms_norm", "eps": 1e-6},
        {"use_conv_transpose": True, "use_conv": False},
        {"kernel_size": 5, "padding": 2},
    ],
)
def test_what_does_something_else_stays(options):
    """No convolution, a norm before it, a transposed one, a larger kernel."""
    other = upsample(**options)
    assert phased(other) is other


def test_a_vae_is_compiled_by_phases_and_defined_without():
    """The VAE that torch runs is as it was; its weights are shared."""
    from diffusers import AutoencoderKL

    with seeded(1):
        vae = AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            up_block_types=("UpDecoderBlock2D",) * 2,
            down_block_types=("DownEncoderBlock2D",) * 2,
        )
    computation = vae_computation(vae.eval())
    assert computation.faster is not None
    kinds = {type(part) for part in computation.faster.modules()}
    assert PhasedUpsample in kinds
    assert Upsample2D not in kinds
    assert PhasedUpsample not in {type(part) for part in vae.modules()}
    shared = dict(computation.faster.named_parameters())
    assert shared["vae.decoder.conv_in.weight"] is vae.decoder.conv_in.weight
    with torch.no_grad():
        for ours, wanted in zip(
            computation.faster(*computation.example), computation.module(*computation.example), strict=True
        ):
            assert 0 < float((ours - wanted).abs().max()) < 1e-5
