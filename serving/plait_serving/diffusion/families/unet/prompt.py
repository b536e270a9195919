"""Prompts to text embeddings, computed like diffusers' `encode_prompt`; longer prompts in chunks, never truncated.

A prompt of several chunks (`prompt_tokens`) is encoded chunk by chunk, each alone with its own begin and end, and their
embeddings are joined along L. A prompt that fits into one is encoded by exactly the calls that diffusers makes. Each
call is a piece of work of its own, so that a long prompt holds up nobody's steps.

Legend: L = T * chunks, C text width, P pooled width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.encoders import EncodedText, TextEncoding
from plait_serving.diffusion.families.factors import Kept
from plait_serving.diffusion.families.unet.bundle import Bundle
from plait_serving.diffusion.families.unet.config import UNetKind
from plait_serving.diffusion.families.unet.prompt_tokens import Chunk, PromptTokens, Tokens
from plait_serving.diffusion.protocols import Conditioning
from plait_serving.diffusion.request_terms import RequestSize
from plait_serving.diffusion.values import ImageRequest

_Call: TypeAlias = tuple[int, Chunk, int]
"""A text encoder's index, the ids that it reads, and the layers that it leaves out (`clip_skip`)."""

_REMEMBERED = 128
"""The number of text encoder calls that are kept (at most 0.4 MB each for SDXL): negative prompts, empty chunks and
retries recur."""


class PromptEncoder:
    """Encodes with the current weights of a bundle's text encoders. Compute thread only, except `tokens`."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        weights_version: Callable[[], Hashable] = lambda: (),
        tokens: PromptTokens | None = None,
    ) -> None:
        """Take the bundle. `weights_version` tells what is in the text encoders: what was encoded with it is remembered
        until it is there again. `tokens`: those of the bundle's tokenizers, if others use these as well."""
        self._bundle = bundle
        self._is_xl = bundle.kind is UNetKind.SDXL
        self._version = weights_version
        self._known: Kept[EncodedText] = Kept(_REMEMBERED, sys.maxsize)
        self.tokens = PromptTokens(bundle.tokenizers) if tokens is None else tokens

    def size(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError` if the text encoders have too few layers
        for its `clip_skip`."""
        layers = min(int(cast("Any", encoder).config.num_hidden_layers) for encoder in self._bundle.text_encoders)
        layers -= self._is_xl  # SDXL reads the layer before the last even without
        if request.clip_skip > layers:
            raise RequestError(f"this model's text encoders can leave out at most {layers} layers", param="clip_skip")
        return self.tokens.size(request, self._branches(request))

    def _branches(self, request: ImageRequest) -> int:
        """Return 2 if classifier-free guidance runs: above 1 (diffusers' rule), unless it is an input of the UNet."""
        return 2 if request.guidance_scale > 1.0 and not self._bundle.embeds_guidance else 1

    def begin(self, request: ImageRequest) -> TextEncoding[_Call]:
        """Return what encodes a request's prompts, a call at a time."""
        uses_cfg = self._branches(request) == 2
        prompt, negative = self.tokens.pair(request)
        # diffusers' rule where no negative prompt was given: the empty one is encoded like any other.
        absent = request.negative_prompt is None
        zeros = uses_cfg and self._is_xl and self._bundle.force_zeros_for_empty_prompt and absent
        read = ((negative, request.negative_clip_skip), (prompt, request.clip_skip))[0 if uses_cfg else 1 :]
        count = max(len(chunks) for tokens, _ in read for chunks in tokens.chunks)
        texts = [self._filled(tokens, count, skip) for tokens, skip in read[1 if zeros else 0 :]]

        def finish(done: Mapping[_Call, EncodedText]) -> Conditioning:
            joined = [_joined(text, done) for text in texts]
            return self._conditioning([_zeros_like(joined[0]), *joined] if zeros else joined, request)

        return TextEncoding([call for text in texts for calls in text for call in calls], run=self._run, finish=finish)

    def _filled(self, tokens: Tokens, count: int, skip: int) -> list[list[_Call]]:
        """Return the calls for each text encoder, `count` of them: chunks that a text does not fill are empty."""
        empty = self.tokens.of("")
        return [
            [(encoder, chunk, skip) for chunk in (*chunks, *[empty.chunks[encoder][0]] * (count - len(chunks)))]
            for encoder, chunks in enumerate(tokens.chunks)
        ]

    def _run(self, call: _Call) -> EncodedText:
        """Make one text encoder call, or remember its result."""
        return self._known.get((self._version(), call), lambda: (self._encode(*call), 0))

    @torch.inference_mode()
    def _encode(self, index: int, chunk: Chunk, skip: int) -> EncodedText:
        """Encode one chunk as one row: larger batches would round differently from diffusers."""
        text = self._encode_ids(index, chunk.ids, skip)
        if chunk.weights is None:
            return text
        return EncodedText(hidden=weighted(text.hidden, chunk.weights), pooled=text.pooled)

    def _encode_ids(self, index: int, ids: tuple[int, ...], skip: int) -> EncodedText:
        encoder, tokenizer = self._bundle.text_encoders[index], self._bundle.tokenizers[index]
        tokens = torch.tensor([ids], device=self._bundle.device)
        config = cast("Any", encoder).config
        if self._is_xl:
            output = encoder(tokens, output_hidden_states=True)
            pooled = output[0] if output[0].ndim == 2 else None
            return EncodedText(hidden=output.hidden_states[-(skip + 2)], pooled=pooled)
        mask = _padding_mask(tokens, tokenizer) if getattr(config, "use_attention_mask", False) else None
        if not skip:
            return EncodedText(hidden=encoder(tokens, attention_mask=mask)[0], pooled=None)
        output = encoder(tokens, attention_mask=mask, output_hidden_states=True)
        body: Any = getattr(encoder, "text_model", encoder)  # transformers 5 dropped this level
        return EncodedText(hidden=body.final_layer_norm(output.hidden_states[-(skip + 1)]), pooled=None)

    @torch.inference_mode()
    def _conditioning(self, texts: Sequence[EncodedText], request: ImageRequest) -> Conditioning:
        dtype = cast("Any", self._bundle.text_encoders[-1]).dtype
        return Conditioning(
            text=torch.cat([text.hidden for text in texts]).to(dtype),
            added=self._added(texts, request) if self._is_xl else {},
            n=request.n,
        )

    def _added(self, encoded: Sequence[EncodedText], request: ImageRequest) -> dict[str, torch.Tensor]:
        """Return SDXL's pooled text and its six sizes: original (h, w), crop (top, left), target (h, w)."""
        pooled = torch.cat([cast("torch.Tensor", text.pooled) for text in encoded])
        size = (request.height, request.width)
        original, target = ((given[1], given[0]) if given else size
                            for given in (request.original_size, request.target_size))  # fmt: skip
        left, top = request.crop
        dtype, device = encoded[-1].hidden.dtype, encoded[-1].hidden.device
        time_ids = torch.tensor([[*original, top, left, *target]] * len(encoded), dtype=dtype, device=device)
        return {"text_embeds": pooled, "time_ids": time_ids}


def _joined(text: Sequence[Sequence[_Call]], done: Mapping[_Call, EncodedText]) -> EncodedText:
    """Join the chunks along L, then the text encoders along C; pooled is the last one's first chunk."""
    parts = [[done[call] for call in calls] for calls in text]
    hiddens = [torch.cat([chunk.hidden for chunk in chunks], dim=1) for chunks in parts]
    hidden = hiddens[0] if len(hiddens) == 1 else torch.concat(hiddens, dim=-1)
    return EncodedText(hidden=hidden, pooled=parts[-1][0].pooled)


def weighted(hidden: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Return `hidden (1, T, C)` with each token times its weight, brought back to the mean that it had: A1111's
    default emphasis ("Original"), chunk by chunk and text encoder by text encoder."""
    scaled = hidden * torch.tensor(weights, dtype=hidden.dtype, device=hidden.device)[None, :, None]
    return scaled * (hidden.mean() / scaled.mean())


def _padding_mask(tokens: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Return 1 up to and including the end token, like the tokenizer's own mask."""
    end = (tokens == tokenizer.eos_token_id).int().argmax(dim=-1)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    mask: torch.Tensor = positions[None] <= end[:, None]
    return mask.long()


def _zeros_like(text: EncodedText) -> EncodedText:
    pooled = None if text.pooled is None else torch.zeros_like(text.pooled)
    return EncodedText(hidden=torch.zeros_like(text.hidden), pooled=pooled)
