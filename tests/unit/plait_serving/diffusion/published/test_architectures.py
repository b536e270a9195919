"""The architectures are the published ones: their parameters are counted without memory for them."""

from __future__ import annotations

import pytest

from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.configs import build_on_meta
from plait_serving.random_models import LoraSpelling
from plait_serving.random_models.loras import drawn_factors

CLIP_L, CLIP_H, CLIP_BIG_G, VAE = 123_060_480, 340_387_840, 694_659_840, 83_653_863
T5, VAE_16 = 4_762_310_656, 83_819_683
SD3_TEXT = {"text_encoder": CLIP_L + 768 * 768, "text_encoder_2": CLIP_BIG_G, "text_encoder_3": T5}
FLUX_TEXT = {"text_encoder": CLIP_L, "text_encoder_2": T5}
PUBLISHED = {
    FamilyName.SD15: {"unet": 859_520_964, "text_encoder": CLIP_L, "vae": VAE},
    FamilyName.SD21: {"unet": 865_910_724, "text_encoder": CLIP_H, "vae": VAE},
    FamilyName.SDXL: {"unet": 2_567_463_684, "text_encoder": CLIP_L, "text_encoder_2": CLIP_BIG_G, "vae": VAE},
    FamilyName.SD15_CONTROLNET: {"": 361_279_120},
    FamilyName.SDXL_CONTROLNET: {"": 1_251_014_160},
    FamilyName.SD35_MEDIUM: {"transformer": 2_243_171_520, **SD3_TEXT, "vae": VAE_16},
    FamilyName.SD35_LARGE: {"transformer": 8_056_627_520, **SD3_TEXT, "vae": VAE_16},
    FamilyName.FLUX_DEV: {"transformer": 11_901_408_320, **FLUX_TEXT, "vae": VAE_16},
    FamilyName.FLUX_SCHNELL: {"transformer": 11_891_178_560, **FLUX_TEXT, "vae": VAE_16},
}
# What sd-scripts prints when it makes a LoRA, and the layers of diffusers' training scripts.
LAYERS = {
    (FamilyName.SD15, LoraSpelling.KOHYA): {"lora_unet_": 192, "lora_te_": 72},
    (FamilyName.SDXL, LoraSpelling.KOHYA): {"lora_unet_": 722, "lora_te1_": 72, "lora_te2_": 264 - 72},
    (FamilyName.SD15, LoraSpelling.PEFT): {"unet.": 16 * 8, "text_encoder.": 12 * 4},
    (FamilyName.SD35_MEDIUM, LoraSpelling.KOHYA): {"lora_unet_joint_blocks_": 24 * 10 + 13 * 2 - 3},
    (FamilyName.SD35_MEDIUM, LoraSpelling.PEFT): {"transformer.": 24 * 8 - 1},
    (FamilyName.FLUX_DEV, LoraSpelling.KOHYA): {
        "lora_unet_double_blocks_": 19 * 10,
        "lora_unet_single_blocks_": 38 * 3,
    },
    (FamilyName.FLUX_DEV, LoraSpelling.PEFT): {"transformer.": 19 * 8 + 38 * 3},
    (FamilyName.SDXL, LoraSpelling.PEFT): {"unet.": 70 * 8, "text_encoder.": 12 * 4, "text_encoder_2.": 32 * 4},
}


@pytest.mark.parametrize("family", FamilyName)
def test_parameter_counts_are_the_published_ones(family):
    """Every part has as many parameters as the file that people download."""
    counts = {
        part.folder: sum(parameter.numel() for parameter in build_on_meta(part).parameters())
        for part in ARCHITECTURES[family].parts
    }
    assert counts == PUBLISHED[family]


@pytest.mark.parametrize(("family", "spelling"), LAYERS)
def test_loras_have_the_layers_of_real_ones(family, spelling):
    """A LoRA touches as many layers of each part as the training scripts' do."""
    keys = [tensor.key for tensor in drawn_factors(ARCHITECTURES[family], spelling=spelling, rank=4)]
    assert len(keys) == len(set(keys))
    ups = [key for key in keys if key.endswith((".lora_up.weight", ".lora_B.weight"))]
    counts = {start: sum(key.startswith(start) for key in ups) for start in LAYERS[family, spelling]}
    assert counts == LAYERS[family, spelling]
    assert sum(counts.values()) == len(ups)
