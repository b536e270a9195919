"""Tiny random models as diffusers folders: built in a second, deterministic, without any download.

Every builder writes into a folder it is given and returns it. The same arguments always give the same bytes, and no
builder touches torch's global random state. Images are 32x32 (latents 16x16, a VAE factor of 2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, ControlNetModel, DDIMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from safetensors import safe_open
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support.loras import factors, kohya_tensors, peft_tensors, write

IMAGE_SIZE = 32
WORDS = ("red", "green", "blue", "apple", "pear", "cat", "dog", "house", "tree", "face", "the", "and", "with", "photo")
_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's CPU generator seeded inside, as it was outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def tiny_tokenizer(folder: Path, *, pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """Writes a byte-level CLIP tokenizer whose only merges spell a few words; 77 tokens long as the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols = list(bytes_to_unicode().values())
    vocabulary = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
    merges: list[str] = []
    for word in WORDS:
        left = word[0]
        for i, letter in enumerate(word[1:], start=1):
            right = f"{letter}</w>" if i == len(word) - 1 else letter
            if f"{left} {right}" not in merges:
                merges.append(f"{left} {right}")
                vocabulary.append(left + right)
            left += right
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    tokens = {token: i for i, token in enumerate(dict.fromkeys(vocabulary))}
    (folder / "vocab.json").write_text(json.dumps(tokens, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    tokenizer = CLIPTokenizer.from_pretrained(folder, pad_token=pad_token, model_max_length=77)
    tokenizer.save_pretrained(folder)
    return tokenizer


# ---- base models ----------------------------------------------------------------------------------------------------


def tiny_sd(
    folder: Path, *, seed: int = 0, safety_checker: bool = False, dtype: torch.dtype = torch.float32, **unet: object
) -> Path:
    """Writes a Stable Diffusion 1.x folder (0.4 M parameters). ``unet`` overrides entries of the UNet's config."""
    tokenizer = tiny_tokenizer(folder / "tokenizer")
    config = {
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 2,
        "cross_attention_dim": 32,
        "norm_num_groups": 8,
        **unet,
    }
    with seeded(seed):
        parts: dict[str, Any] = {
            "unet": UNet2DConditionModel(**config).to(dtype),
            "vae": tiny_vae(scaling_factor=0.18215).to(dtype),
            "text_encoder": text_model(CLIPTextModel, tokenizer).to(dtype),
        }
    parts |= {
        "scheduler": _scheduler(DDIMScheduler, clip_sample=False, set_alpha_to_one=False),
        "tokenizer": CLIP_TOKENIZER,
        **(_safety_checker(folder, seed) if safety_checker else {"safety_checker": NO, "feature_extractor": NO}),
    }
    return write_parts(folder, "StableDiffusionPipeline", parts, requires_safety_checker=safety_checker)


def tiny_sdxl(folder: Path, *, seed: int = 0, **unet: object) -> Path:
    """Writes a Stable Diffusion XL folder with both text encoders. ``unet`` overrides entries of the UNet's config."""
    tokenizer = tiny_tokenizer(folder / "tokenizer")
    tiny_tokenizer(folder / "tokenizer_2", pad_token="!")
    config = {
        "sample_size": 16,
        "block_out_channels": (16, 32),
        "layers_per_block": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "transformer_layers_per_block": (1, 2),
        "projection_class_embeddings_input_dim": 6 * 8 + 32,
        "cross_attention_dim": 64,
        "norm_num_groups": 8,
        **unet,
    }
    with seeded(seed):
        parts: dict[str, Any] = {
            "unet": UNet2DConditionModel(**config),
            "vae": tiny_vae(scaling_factor=0.13025, force_upcast=True),
            "text_encoder": text_model(CLIPTextModel, tokenizer),
            "text_encoder_2": text_model(CLIPTextModelWithProjection, tokenizer),
        }
    parts |= {
        "scheduler": _scheduler(EulerDiscreteScheduler, timestep_spacing="leading"),
        "tokenizer": CLIP_TOKENIZER,
        "tokenizer_2": CLIP_TOKENIZER,
    }
    return write_parts(folder, "StableDiffusionXLPipeline", parts, force_zeros_for_empty_prompt=True)


def tiny_vae(**config: object) -> AutoencoderKL:
    """A tiny VAE; ``config`` adds to its own, or overrides it."""
    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=IMAGE_SIZE,
        **{"force_upcast": False, **config},
    )


def text_model(kind: type[CLIPTextModel], tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """A tiny CLIP of that class."""
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=37,
        num_attention_heads=4,
        num_hidden_layers=3,
        projection_dim=32,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return kind(config)


def _scheduler(kind: type[DDIMScheduler], **extra: object) -> DDIMScheduler:
    return kind(**_BETAS, steps_offset=1, **extra)


def _safety_checker(folder: Path, seed: int) -> dict[str, list[str | None]]:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPConfig

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
              "image_size": 32, "patch_size": 16, "projection_dim": 8}  # fmt: skip
    with seeded(seed):
        checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=vision, text_config={}, projection_dim=8))
    checker.save_pretrained(folder / "safety_checker")
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder / "feature_extractor")
    return {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
    }


CLIP_TOKENIZER, NO = ["transformers", "CLIPTokenizer"], [None, None]
"""What an index says of a part that was written before, and of one that is not there."""


def write_parts(folder: Path, pipeline: str, parts: dict[str, Any], **extra: object) -> Path:
    """Writes the parts of a pipeline, and the index that names them."""
    import diffusers

    index = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__, **extra}
    for name, part in parts.items():
        index[name] = part
        if not isinstance(part, list):
            part.save_pretrained(folder / name)
            index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


# ---- ControlNets ----------------------------------------------------------------------------------------------------


def tiny_controlnet(folder: Path, base: Path, *, seed: int = 1) -> Path:
    """Writes a ControlNet for the UNet in ``base``, its zero convolutions randomised.

    As diffusers makes them they are zero, every residual is zero, and a test of ControlNets proves nothing.
    """
    unet = UNet2DConditionModel.from_pretrained(base / "unet", local_files_only=True)
    with seeded(seed):
        net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8), load_weights_from_unet=False)
        randomise_zero_convolutions(net)
    net.save_pretrained(folder)
    return folder


def randomise_zero_convolutions(net: ControlNetModel) -> None:
    """Gives the down, mid and image-embedding output convolutions weights large enough to change an image."""
    zeroed = [*net.controlnet_down_blocks, net.controlnet_mid_block, net.controlnet_cond_embedding.conv_out]
    for convolution in zeroed:
        fan_in = math.prod(convolution.weight.shape[1:])
        torch.nn.init.normal_(convolution.weight, std=0.5 / math.sqrt(fan_in))
        torch.nn.init.normal_(convolution.bias, std=0.1)


# ---- LoRAs ----------------------------------------------------------------------------------------------------------


def tiny_lora(
    path: Path,
    base: Path,
    *,
    fmt: Literal["peft", "kohya"] = "peft",
    rank: int = 4,
    alpha: float | None = None,
    with_text_encoder: bool = False,
    conv: bool = False,
    time: bool = False,
    seed: int = 2,
    strength: float = 0.3,
) -> Path:
    """Writes a LoRA of the attention layers of ``base`` (and feed-forward; conv, time embedding, text
    encoders if asked).

    ``alpha``: of kohya's format, half the rank unless given. ``strength`` is about the size of the delta relative to
    the weight.
    """
    alpha = alpha or rank / (2 if fmt == "kohya" else 1)
    tensors: dict[str, torch.Tensor] = {}
    for number, part in enumerate(("unet", "text_encoder", "text_encoder_2")[: 3 if with_text_encoder else 1]):
        if (base / part).is_dir():
            shapes = lora_targets(base, part, conv=conv, time=time)
            made = factors(shapes, rank=rank, alpha=alpha, seed=seed + 100 * number, strength=strength * rank / alpha)
            is_first = part == "text_encoder" and (base / "text_encoder_2").is_dir()
            named = kohya_tensors(made, "text_encoder_1" if is_first else part)
            tensors |= named if fmt == "kohya" else peft_tensors(made, part)
    return write(path, tensors)


def lora_targets(base: Path, part: str, *, conv: bool = False, time: bool = False) -> dict[str, tuple[int, ...]]:
    """Module paths of ``part`` that a LoRA may touch, with their weight shapes."""
    stem = "diffusion_pytorch_model" if part == "unet" else "model"
    linear = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "q_proj", "k_proj", "v_proj", "out_proj")
    convolutions = ("conv1", "conv2", "conv_shortcut", "downsamplers.0.conv")
    steps = ("time_embedding.linear_1", "time_embedding.linear_2")
    wanted = linear + (convolutions if conv else ()) + (steps if time else ())
    with safe_open(base / part / f"{stem}.safetensors", framework="pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys() if key.endswith(".weight")}  # noqa: SIM118 - safe_open is no mapping
    return {key.removesuffix(".weight"): shape for key, shape in shapes.items() if key[:-7].endswith(wanted)}
