"""Tiny random Stable Diffusion 3 and FLUX.1 models as diffusers folders, and diffusers' answers to compare with.

Images are 32x32: latents of 16 channels, 16x16, a VAE factor of 2, 64 tokens.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel, SD3Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel, T5TokenizerFast

from plait_kernels.executors import MODULES
from plait_serving.diffusion.values import ImageRequest, Scheduler, Sigmas
from support.denoise import edits_of, fused
from support.tiny import CLIP_TOKENIZER, NO, WORDS, seeded, text_model, tiny_tokenizer, tiny_vae, write_parts

SHIFTS = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 16, "max_image_seq_len": 256}
"""Bounds of so few tokens that tiny images lie between them."""


def tiny_t5_tokenizer(folder: Path) -> T5TokenizerFast:
    """Writes a Unigram tokenizer of letters and a few words."""
    pieces = ["▁", *(f"▁{word}" for word in WORDS), *(chr(code) for code in range(32, 127))]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
    vocabulary += [(piece, -len(vocabulary) / (len(piece) + 1.0)) for piece in dict.fromkeys(pieces)]
    tokenizer = T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_sd3(
    folder: Path, *, seed: int = 0, t5: bool = True, dtype: torch.dtype = torch.float32, **transformer: Any
) -> Path:
    """Writes a Stable Diffusion 3.5 folder. ``transformer`` overrides entries of that config."""
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 2,
        "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 72, "caption_projection_dim": 32,
        "pooled_projection_dim": 64, "pos_embed_max_size": 32, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        **transformer,
    }  # fmt: skip
    clip = tiny_tokenizer(folder / "tokenizer")
    tiny_tokenizer(folder / "tokenizer_2", pad_token="!")
    with seeded(seed):
        parts: dict[str, Any] = {
            "transformer": SD3Transformer2DModel(**config).to(dtype),
            "vae": _vae(1.5305, 0.0609).to(dtype),
            "text_encoder": text_model(CLIPTextModelWithProjection, clip).to(dtype),
            "text_encoder_2": text_model(CLIPTextModelWithProjection, clip).to(dtype),
            "text_encoder_3": _t5(tiny_t5_tokenizer(folder / "tokenizer_3"), 72).to(dtype) if t5 else NO,
        }
    parts |= {
        **_NOT_READ, "tokenizer": CLIP_TOKENIZER, "tokenizer_2": CLIP_TOKENIZER,
        "tokenizer_3": T5_TOKENIZER if t5 else NO, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }  # fmt: skip
    return write_parts(folder, "StableDiffusion3Pipeline", parts)


def tiny_flux(
    folder: Path,
    *,
    seed: int = 0,
    guidance: bool = True,
    kontext: bool = False,
    dtype: torch.dtype = torch.float32,
    **transformer: Any,
) -> Path:
    """Writes a FLUX.1 folder: dev, without ``guidance`` schnell, or Kontext. ``transformer`` overrides entries of that
    config."""
    config = {
        "patch_size": 1, "in_channels": 64, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": guidance, **transformer,
    }  # fmt: skip
    clip = tiny_tokenizer(folder / "tokenizer")
    with seeded(seed):
        parts: dict[str, Any] = {
            "transformer": FluxTransformer2DModel(**config).to(dtype),
            "vae": _vae(0.3611, 0.1159).to(dtype),
            "text_encoder": text_model(CLIPTextModel, clip).to(dtype),
            "text_encoder_2": _t5(tiny_t5_tokenizer(folder / "tokenizer_2"), 32).to(dtype),
        }
    shift = {"shift": 3.0, "use_dynamic_shifting": True, **SHIFTS} if guidance else {"shift": 1.0}
    parts |= {
        **_NOT_READ, "tokenizer": CLIP_TOKENIZER, "tokenizer_2": T5_TOKENIZER,
        "scheduler": FlowMatchEulerDiscreteScheduler(**shift),
    }  # fmt: skip
    return write_parts(folder, "FluxKontextPipeline" if kontext else "FluxPipeline", parts)


T5_TOKENIZER = ["transformers", "T5TokenizerFast"]
_NOT_READ = {"image_encoder": NO, "feature_extractor": NO}


def _vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    scaled = {"scaling_factor": scaling_factor, "shift_factor": shift_factor, "force_upcast": True}
    return tiny_vae(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, **scaled)


def _t5(tokenizer: T5TokenizerFast, width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=width,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            feed_forward_proj="gated-gelu",
        )
    )


# ---- diffusers' answers ---------------------------------------------------------------------------------------------

_CLASSES = {
    Scheduler.EULER: diffusers.FlowMatchEulerDiscreteScheduler,
    Scheduler.EULER_A: diffusers.FlowMatchEulerDiscreteScheduler,
    Scheduler.HEUN: diffusers.FlowMatchHeunDiscreteScheduler,
    Scheduler.DPMPP_2M: diffusers.DPMSolverMultistepScheduler,
    Scheduler.UNIPC: diffusers.UniPCMultistepScheduler,
}


class FlowReference:
    """diffusers' own pipelines on a folder, one at a time: each with the LoRAs of the request fused."""

    def __init__(self, folder: Path, loras: Path | None = None, dtype: torch.dtype = torch.float32) -> None:
        self._folder, self._loras, self._dtype = folder, loras, dtype
        self._index = json.loads((folder / "model_index.json").read_text())
        self._kept: dict[Any, Any] = {}

    def latents(self, request: ImageRequest) -> torch.Tensor:
        """``(n, c, h, w)`` of the pipeline's call for the same request."""
        pipe = self._pipeline(request)
        found = self._run(pipe, request, output_type="latent")
        if found.ndim == 3:
            found = pipe._unpack_latents(found, request.height, request.width, pipe.vae_scale_factor)
        return found

    def image(self, request: ImageRequest) -> torch.Tensor:
        """``(n, 3, H, W)`` in [0, 1], from those latents."""
        pipe = self._pipeline(request)
        latents = self.latents(request) / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        with torch.inference_mode():
            return (pipe.vae.decode(latents, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)

    def _pipeline(self, request: ImageRequest) -> Any:
        name = f"{self._index['_class_name'].removesuffix('Pipeline')}{edits_of(request)}Pipeline"
        key = name, request.loras
        if key not in self._kept:
            with MODULES:
                # diffusers wants to be told what the folder says is not there.
                absent = {part: None for part, kind in self._index.items() if kind == [None, None]}
                pipe = getattr(diffusers, name).from_pretrained(self._folder, dtype=self._dtype, **absent)
            pipe.set_progress_bar_config(disable=True)
            self._kept[key] = fused(pipe, self._loras, request)
        return self._kept[key]

    def _run(self, pipe: Any, request: ImageRequest, **extra: Any) -> torch.Tensor:
        if request.edit is not None and request.n > 1:
            alone = [replace(request, n=1, seed=seed) for seed in request.seeds]
            return torch.cat([self._run(pipe, one, **extra) for one in alone])
        generators = [torch.Generator().manual_seed(seed) for seed in request.seeds]
        own = pipe.scheduler
        pipe.scheduler = _scheduler(own, request)
        if request.scheduler is Scheduler.EULER_A:
            _draws(pipe, generators, request)
        takes = inspect.signature(pipe.__call__).parameters
        wanted = {**_arguments(request), **extra}
        try:
            with torch.inference_mode():
                return pipe(
                    generator=generators, **{key: value for key, value in wanted.items() if key in takes}
                ).images
        finally:
            pipe.scheduler = own


def _arguments(request: ImageRequest) -> Mapping[str, Any]:
    wanted: dict[str, Any] = {
        "prompt": request.prompt, "prompt_2": request.prompt_2, "negative_prompt": request.negative_prompt,
        "negative_prompt_2": request.negative_prompt_2, "num_inference_steps": request.steps,
        "guidance_scale": request.guidance_scale, "true_cfg_scale": request.true_cfg_scale,
        "num_images_per_prompt": request.n, "width": request.width, "height": request.height,
        "max_area": request.width * request.height, "clip_skip": request.clip_skip or None,
        # The only prompt that the API has no field for: T5 reads what the first text encoder reads.
        "prompt_3": request.prompt, "negative_prompt_3": request.negative_prompt,
    }  # fmt: skip
    if request.max_sequence_length is not None:
        wanted["max_sequence_length"] = request.max_sequence_length
    if request.reference is not None:
        wanted["image"] = Image.fromarray(request.reference)
    if request.edit is not None:
        wanted |= {"image": Image.fromarray(request.edit.image), "strength": request.edit.strength}
        if request.edit.mask is not None:
            wanted["mask_image"] = Image.fromarray(request.edit.mask)
    return wanted


def _scheduler(own: Any, request: ImageRequest) -> Any:
    changes: dict[str, Any] = {}
    if request.scheduler in (Scheduler.DPMPP_2M, Scheduler.UNIPC):
        changes = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": own.config.shift}
    if request.scheduler is Scheduler.EULER_A:
        changes = {"stochastic_sampling": True}
    if request.sigmas is not None:
        changes |= {f"use_{each}_sigmas": request.sigmas is each for each in Sigmas if each is not Sigmas.NORMAL}
    return _CLASSES[request.scheduler].from_config(own.config, **changes)


def _draws(pipe: Any, generators: list[torch.Generator], request: ImageRequest) -> None:
    """Has a stochastic scheduler draw from the request's generators, which pipelines do not hand it: what the latents
    are, image by image, whatever their packing."""
    step = pipe.scheduler.step

    def drawing(output: Any, t: Any, sample: Any, **extra: Any) -> Any:
        if sample.ndim == 4:
            return step(output, t, sample, generator=generators, **extra)
        size = request.height, request.width, pipe.vae_scale_factor
        shape = pipe._unpack_latents(sample, *size).shape
        inner = [pipe._unpack_latents(each, *size) for each in (output, sample)]
        found = step(inner[0], t, inner[1], generator=generators, **extra)
        return (pipe._pack_latents(found[0], *shape),)

    pipe.scheduler.step = drawing


# ---- LoRAs ----------------------------------------------------------------------------------------------------------


def tiny_flow_lora(
    path: Path,
    base: Path,
    *,
    rank: int = 4,
    seed: int = 2,
    strength: float = 0.3,
    text: bool = False,
    only: str = "",
    dora: bool = False,
) -> Path:
    """Writes a LoRA in PEFT's format of all linear layers of the transformer in ``base`` whose path holds ``only``;
    with ``text``, of the first text encoder too. ``dora``: the rows of its weights have norms of their own."""
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for part in ("transformer", "text_encoder")[: 2 if text else 1]:
        for module, weight in _linear_layers(base, part).items():
            if part == "transformer" and only not in module:
                continue
            rows, columns = weight.shape
            if dora:
                norms = weight.norm(dim=1) * (0.8 + 0.4 * torch.rand(rows, generator=rng))
                tensors[f"{part}.{module}.lora_magnitude_vector"] = norms
            down = torch.randn(rank, columns, generator=rng) / columns**0.5
            tensors[f"{part}.{module}.lora_A.weight"] = down
            tensors[f"{part}.{module}.lora_B.weight"] = torch.randn(rows, rank, generator=rng) * strength / rank**0.5
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _linear_layers(base: Path, part: str) -> dict[str, torch.Tensor]:
    """The paths and weights of a part's linear layers: of CLIP, those of attention."""
    index = json.loads((base / "model_index.json").read_text())
    kind = getattr(diffusers, index[part][1], None) or getattr(transformers, index[part][1])
    module = kind.from_pretrained(base / part, local_files_only=True)
    wanted = ("q_proj", "k_proj", "v_proj", "out_proj") if part == "text_encoder" else ("",)
    return {
        name: layer.weight.detach()
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.endswith(wanted)
    }
