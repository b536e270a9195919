"""FLUX.1 behind the `Denoiser` protocol: the text of CLIP and T5, packed latents with positions, and a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from plait_serving.diffusion.edits import to_pixels
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.encoders import Call, EncodedText, Outputs, TextEncoding
from plait_serving.diffusion.families.flow.denoiser import FlowBundle, FlowDenoiser
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.families.rows import Rows
from plait_serving.diffusion.protocols import Conditioning, Encoding
from plait_serving.diffusion.values import ImageRequest, RgbImage

CLIP, T5 = "text_encoder", "text_encoder_2"
_PATCH = 2
_REFERENCE = Call("vae", ())
"""Of a request with a reference image the first call: of the VAE's encoder."""

KONTEXT_SIZES = (
    (672, 1568), (688, 1504), (720, 1456), (752, 1392), (800, 1328), (832, 1248), (880, 1184), (944, 1104),
    (1024, 1024), (1104, 944), (1184, 880), (1248, 832), (1328, 800), (1392, 752), (1456, 720), (1504, 688),
    (1568, 672),
)  # fmt: skip
"""The sizes `(width, height)` of the images that FLUX.1 Kontext was trained on."""


class FluxDenoiser(FlowDenoiser):
    """One model: dev, schnell or Kontext."""

    def begin(self, request: ImageRequest) -> Encoding:
        """Return what encodes a reference, if there is one, and the prompts, the negative one first if the request has
        true CFG."""
        texts, reference = calls_of(self.tokens, request, length_of(request, self.bundle)), request.reference
        calls = [call for text in texts for call in text]
        return TextEncoding(
            calls if reference is None else [_REFERENCE, *calls],
            run=lambda call: self.encoded(call) if reference is None or call != _REFERENCE else self._read(reference),
            finish=lambda outputs: self._conditioning(texts, outputs, request.n),
        )

    @torch.inference_mode()
    def _conditioning(self, texts: Sequence[Sequence[Call]], outputs: Outputs, n: int) -> Conditioning:
        pooled = [outputs[clip].pooled for clip, _ in texts]
        added = {"pooled": torch.cat([each for each in pooled if each is not None]).to(self.bundle.dtype)}
        if (read := outputs.get(_REFERENCE)) is not None and read.pooled is not None:
            added["reference"] = read.hidden.expand(len(texts), -1, -1)
            added["reference_positions"] = read.pooled.expand(len(texts), -1, -1)
        text = torch.cat([outputs[long].hidden for _, long in texts]).to(self.bundle.dtype)
        return Conditioning(text=text, added=added, n=n)

    @torch.inference_mode()
    def _read(self, image: RgbImage) -> EncodedText:
        """Return the tokens `(1, T, C)` of an image of any size and, as what is pooled, their positions `(1, T, 3)`."""
        found = self.bundle.encode(to_pixels(snapped(image, self.bundle)))
        latents = (found.mean - found.centre) * found.factor
        return EncodedText(packed(latents), positions_of(latents, which=1).to(latents)[None])

    def run(self, rows: Rows) -> torch.Tensor:
        """Return the transformer's output `(R, c, h, w)`; timesteps and guidance are rounded as in diffusers."""
        sample, added = rows.sample, rows.added
        tokens, positions = packed(sample), positions_of(sample, which=0).to(sample)
        count, guidance = tokens.shape[1], None
        if "reference" in added:
            tokens = torch.cat([tokens, added["reference"]], dim=1)
            positions = torch.cat([positions, added["reference_positions"][0]])
        if self.transformer.config.guidance_embeds:
            guidance = torch.tensor(rows.scales, device=sample.device, dtype=torch.float32)
        output: torch.Tensor = self.transformer(
            hidden_states=tokens,
            timestep=rows.timesteps.to(sample.dtype) / 1000,
            guidance=guidance,
            pooled_projections=added["pooled"],
            encoder_hidden_states=rows.text,
            txt_ids=rows.text.new_zeros(rows.text.shape[1], 3),
            img_ids=positions,
            return_dict=False,
        )[0]
        return unpacked(output[:, :count], like=sample)

    def scale_of(self, request: ImageRequest) -> float:
        """Return the request's `true_cfg_scale`: its `guidance_scale` is an input."""
        return request.true_cfg_scale


# ---- text -----------------------------------------------------------------------------------------------------------


def is_guided(request: ImageRequest) -> bool:
    """Return whether the transformer runs on two rows an image: diffusers' rule for its true CFG."""
    return request.true_cfg_scale > 1.0 and request.negative_prompt is not None


def is_schnell(bundle: FlowBundle) -> bool:
    """Return whether a model takes no guidance of any kind: it has no input for it, nor is its schedule shifted. Those
    that were made of dev to take a negative prompt lack the input, too, and keep dev's schedule."""
    schedule = bundle.schedules.config
    return not (bundle.config.guidance_embeds or schedule["use_dynamic_shifting"] or schedule["shift"] != 1.0)


def longest(bundle: FlowBundle) -> int:
    """Return the longest text that a model was made for: schnell for 256 tokens."""
    return 256 if is_schnell(bundle) else 512


def length_of(request: ImageRequest, bundle: FlowBundle) -> int:
    """Return what T5's text is filled up to."""
    return longest(bundle) if request.max_sequence_length is None else request.max_sequence_length


def calls_of(tokens: TextTokens, request: ImageRequest, length: int) -> list[list[Call]]:
    """Return the text encoder calls of a request's texts, the negative one first: CLIP's, then T5's."""
    negative = request.negative_prompt or ""
    texts = [(negative, request.negative_prompt_2 or negative)] if is_guided(request) else []
    texts += [(request.prompt, request.prompt_2 or request.prompt)]
    return [[tokens.clip(CLIP, first), tokens.t5(T5, second, length)] for first, second in texts]


# ---- latents --------------------------------------------------------------------------------------------------------


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Return `(n, c, h, w)` as tokens `(n, h/2 * w/2, 4 c)`: a token is two by two latents, channel by channel."""
    n, c, h, w = latents.shape
    patches = latents.reshape(n, c, h // _PATCH, _PATCH, w // _PATCH, _PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(n, (h // _PATCH) * (w // _PATCH), c * _PATCH * _PATCH)


def unpacked(tokens: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return tokens as latents of a shape `(n, c, h, w)`: `packed` undone."""
    n, c, h, w = like.shape
    patches = tokens.reshape(n, h // _PATCH, w // _PATCH, c, _PATCH, _PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(n, c, h, w)


def positions_of(latents: torch.Tensor, *, which: int) -> torch.Tensor:
    """Return `float32 (tokens, 3)`: the number of the image (1: a reference), the row and the column of each token."""
    h, w = latents.shape[2] // _PATCH, latents.shape[3] // _PATCH
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack([torch.full_like(rows, which), rows, columns], dim=-1).reshape(h * w, 3).float()


def snapped(image: RgbImage, bundle: FlowBundle) -> RgbImage:
    """Return a reference at its `snapped_size`, resampled as diffusers does it."""
    return np.asarray(Image.fromarray(image).resize(snapped_size(image, bundle), Image.Resampling.LANCZOS))


def snapped_size(image: RgbImage, bundle: FlowBundle) -> tuple[int, int]:
    """Return `(width, height)` of a reference as the model reads it, in pixels: of those that it was trained on the one
    whose aspect ratio is nearest. Raises `RequestError` for one that is smaller than a token."""
    multiple = bundle.pixels_per_token
    height, width = (edge // multiple * multiple for edge in image.shape[:2])
    if not height or not width:
        raise RequestError(f"both edges must have at least {multiple} pixels", param="image")
    _, width, height = min((abs(width / height - w / h), w, h) for w, h in KONTEXT_SIZES)
    return width // multiple * multiple, height // multiple * multiple
