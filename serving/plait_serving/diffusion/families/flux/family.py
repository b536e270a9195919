"""What is known of a FLUX.1 folder without its weights: dev, schnell or Kontext."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from diffusers import AutoencoderKL, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from plait_serving.diffusion.errors import ModelError, RequestError
from plait_serving.diffusion.families.flow.checkpoints import OTHER_INPUTS
from plait_serving.diffusion.families.flow.family import FlowFamily
from plait_serving.diffusion.families.flux.denoiser import (
    CLIP,
    T5,
    FluxDenoiser,
    is_guided,
    is_schnell,
    length_of,
    longest,
    snapped_size,
)
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.sources.file_kinds import read_json
from plait_serving.diffusion.values import ImageRequest

_TAKES = frozenset(("prompt_2", "max_sequence_length"))
_CFG_TAKES = _TAKES | {"true_cfg_scale", "negative_prompt", "negative_prompt_2"}


class FluxFamily(FlowFamily):
    """FLUX.1: dev and Kontext, which take guidance as an input, schnell, which takes none, and what was made of dev to
    take a negative prompt alone."""

    kinds: ClassVar[Mapping[str, Any]] = {
        "transformer": FluxTransformer2DModel, "vae": AutoencoderKL, CLIP: CLIPTextModel, T5: T5EncoderModel,
    }  # fmt: skip
    denoiser = FluxDenoiser
    even = True

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Read a folder's configurations and tokenizers. Raises `ModelError`."""
        super().__init__(folder, settings, host)
        outline, modules = self.outline, self.outline.modules
        self.kind = "flux1"
        reads_images = str(read_json(folder / "model_index.json")["_class_name"]).startswith("FluxKontext")
        takes_guidance, schnell = bool(outline.config.guidance_embeds), is_schnell(outline)
        self.terms = RequestTerms(
            samplers=outline.schedules.choice,
            takes=_TAKES if schnell else _CFG_TAKES | ({"guidance_scale"} if takes_guidance else set()),
            steps=4 if schnell else 28,
            guidance_scale=3.5 if takes_guidance else 0.0,
            edits=not reads_images,
            rounds_up=True,
            reads_images=reads_images,
        )
        channels = 4 * int(outline.vae.config.latent_channels)
        look_alike = OTHER_INPUTS.get(outline.config.in_channels // channels)
        if look_alike is not None:
            raise ModelError(f"{folder / 'transformer' / 'config.json'}: this is {look_alike}: not supported")
        self.check_widths(channels=channels, pooled=modules[CLIP].config.hidden_size, text=modules[T5].config.d_model)

    def measure(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError`."""
        guided, length, most = is_guided(request), length_of(request, self.outline), longest(self.outline)
        if length > most:
            raise RequestError(f"this model reads at most {most} tokens", param="max_sequence_length")
        for name in ("negative_prompt", "negative_prompt_2"):
            if not guided and getattr(request, name):
                needs = "a true_cfg_scale above 1" + " and a negative_prompt" * name.endswith("_2")
                raise RequestError(f"it takes effect with {needs}", param=name)
        if not guided and request.true_cfg_scale > 1.0:
            raise RequestError("it takes effect with a negative_prompt", param="true_cfg_scale")
        texts = dict[str, str]()
        for name in ("prompt", "negative_prompt") if guided else ("prompt",):
            first, second = getattr(request, name), getattr(request, f"{name}_2")
            texts |= {f"{name}_2": second} if second else {name: first}
            self.check_clip(CLIP, {name: first} if second else {})
        return self.size_of(
            request,
            texts,
            reader=T5,
            room=length - 1,
            hint=f"max_sequence_length gives room for up to {most}",
            length=length,
            is_guided=guided,
            reference=None if request.reference is None else snapped_size(request.reference, self.outline),
        )
