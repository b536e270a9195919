"""What is known of a Stable Diffusion 3 or 3.5 folder without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from diffusers import AutoencoderKL, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from plait_serving.diffusion.errors import ModelError, RequestError
from plait_serving.diffusion.families.flow.family import FlowFamily
from plait_serving.diffusion.families.sd3.denoiser import CLIPS, T5, Sd3Denoiser, is_guided, length_of
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest

_TAKES = frozenset(
    ("guidance_scale", "negative_prompt", "prompt_2", "negative_prompt_2", "clip_skip", "max_sequence_length")
)


class Sd3Family(FlowFamily):
    """Stable Diffusion 3 and 3.5, with T5 or without."""

    kinds: ClassVar[Mapping[str, Any]] = {
        "transformer": SD3Transformer2DModel,
        "vae": AutoencoderKL,
        **dict.fromkeys(CLIPS, CLIPTextModelWithProjection),
        T5: T5EncoderModel,
    }
    may_lack = (T5,)
    denoiser = Sd3Denoiser
    even = False

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Read a folder's configurations and tokenizers. Raises `ModelError`."""
        super().__init__(folder, settings, host)
        outline, config = self.outline, self.outline.config
        self.kind = "sd3"
        self._clip_room = min(int(outline.tokenizers[part].model_max_length) for part in CLIPS)
        self._has_t5 = T5 in outline.modules
        self._max_edge = int(config.pos_embed_max_size) * outline.pixels_per_token
        self.terms = RequestTerms(
            samplers=outline.schedules.choice, takes=_TAKES, steps=28, guidance_scale=7.0, rounds_up=True
        )
        clips: list[Any] = [outline.modules[part].config for part in CLIPS]
        text = outline.modules[T5].config.d_model if self._has_t5 else None
        self.check_widths(
            channels=outline.vae.config.latent_channels,
            pooled=sum(each.projection_dim for each in clips),
            text=text,
        )
        if config.patch_size != 2:
            raise ModelError(
                f"{folder / 'transformer' / 'config.json'}: patch_size = {config.patch_size} is not supported"
            )

    def measure(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError`."""
        if max(request.width, request.height) > self._max_edge:
            raise RequestError(f"this model has positions for edges up to {self._max_edge} pixels", param="size")
        layers = min(int(self.outline.modules[part].config.num_hidden_layers) for part in CLIPS) - 1
        if request.clip_skip > layers:
            raise RequestError(f"this model's text encoders can leave out at most {layers} layers", param="clip_skip")
        length, guided = length_of(request), is_guided(request)
        self.check_clip(CLIPS[1], {name: getattr(request, name) for name in ("prompt_2", "negative_prompt_2")})
        texts = {"prompt": request.prompt, **({"negative_prompt": request.negative_prompt or ""} if guided else {})}
        reader, room = (T5, length - 1) if self._has_t5 else (CLIPS[0], self._clip_room - 2)
        hint = "max_sequence_length gives more room" if self._has_t5 else "it has no T5, which reads more"
        return self.size_of(
            request, texts, reader=reader, room=room, hint=hint, length=self._clip_room + length, is_guided=guided
        )
