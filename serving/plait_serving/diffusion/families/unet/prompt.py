"""Prompts to text embeddings, computed like diffusers' `encode_prompt`; longer prompts in chunks, never truncated.

A prompt of several chunks (`prompt_tokens`) is encoded chunk by chunk, each alone with its own begin and end, and their
embeddings are joined along L. A prompt that fits into one is encoded by exactly the calls that diffusers makes. Each
call is a piece of work of its own, so that a long prompt holds up nobody's steps.

Legend: L = T * chunks, C text width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.encoders import Call, EncodedText, Outputs, TextEncoding
from plait_serving.diffusion.families.unet.bundle import UNetBundle
from plait_serving.diffusion.families.unet.config import UNetKind
from plait_serving.diffusion.families.unet.prompt_tokens import Chunk, PromptTokens, Tokens
from plait_serving.diffusion.protocols import Conditioning
from plait_serving.diffusion.request_terms import RequestSize
from plait_serving.diffusion.values import ImageRequest


class PromptEncoder:
    """Encodes with the current weights of a bundle's text encoders. Compute thread only, except `tokens` and `size`,
    for which an outline will do."""

    def __init__(self, bundle: UNetBundle, *, tokens: PromptTokens | None = None) -> None:
        """Take the bundle. `tokens`: those of its tokenizers, if others use these as well."""
        self._bundle = bundle
        self._is_xl = bundle.kind is UNetKind.SDXL
        self.tokens = PromptTokens(bundle.tokenizers.values()) if tokens is None else tokens

    def size(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError` if the text encoders have too few layers
        for its `clip_skip`."""
        layers = min(int(part.config.num_hidden_layers) for part in self._bundle.clips.values())
        layers -= self._is_xl  # SDXL reads the layer before the last even without
        if request.clip_skip > layers:
            raise RequestError(f"this model's text encoders can leave out at most {layers} layers", param="clip_skip")
        return self.tokens.size(request, self._branches(request))

    def _branches(self, request: ImageRequest) -> int:
        """Return 2 if classifier-free guidance runs: above 1 (diffusers' rule), unless it is an input of the UNet."""
        return 2 if request.guidance_scale > 1.0 and not self._bundle.embeds_guidance else 1

    def begin(self, request: ImageRequest) -> TextEncoding:
        """Return what encodes a request's prompts, a call at a time."""
        uses_cfg = self._branches(request) == 2
        prompt, negative = self.tokens.pair(request)
        # diffusers' rule where no negative prompt was given: the empty one is encoded like any other.
        absent = request.negative_prompt is None
        zeros = uses_cfg and self._is_xl and self._bundle.force_zeros_for_empty_prompt and absent
        read = ((negative, request.negative_clip_skip), (prompt, request.clip_skip))[0 if uses_cfg else 1 :]
        count = max(len(chunks) for tokens, _ in read for chunks in tokens.chunks)
        texts = [self._filled(tokens, count, skip) for tokens, skip in read[1 if zeros else 0 :]]

        def finish(done: Outputs) -> Conditioning:
            joined = [_joined(text, done) for text in texts]
            return self._conditioning([_zeros_like(joined[0]), *joined] if zeros else joined, request)

        assert self._bundle.encoders is not None
        calls = [call for text in texts for calls in text for call in calls]
        return TextEncoding(calls, run=self._bundle.encoders.run, finish=finish)

    def _filled(self, tokens: Tokens, count: int, skip: int) -> list[list[Call]]:
        """Return the calls for each text encoder, `count` of them: chunks that a text does not fill are empty."""
        empty = self.tokens.of("")
        return [
            [self.call(i, chunk, skip) for chunk in (*chunks, *[empty.chunks[i][0]] * (count - len(chunks)))]
            for i, chunks in enumerate(tokens.chunks)
        ]

    def call(self, index: int, chunk: Chunk, skip: int) -> Call:
        """Return the call by which a text encoder reads a chunk, as one row: larger batches would round differently
        from diffusers."""
        name, part = list(self._bundle.clips.items())[index]
        if self._is_xl:
            return Call(name, chunk.ids, skip, weights=chunk.weights)
        # A mask shows all up to the end token, like the tokenizer's own.
        end = self._bundle.tokenizers[name].eos_token_id
        seen = chunk.ids.index(end) + 1 if getattr(part.config, "use_attention_mask", False) else None
        return Call(name, chunk.ids, skip, is_last=True, seen=seen, weights=chunk.weights)

    @torch.inference_mode()
    def _conditioning(self, texts: Sequence[EncodedText], request: ImageRequest) -> Conditioning:
        return Conditioning(
            text=torch.cat([text.hidden for text in texts]).to(self._bundle.dtype),
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


def _joined(text: Sequence[Sequence[Call]], done: Outputs) -> EncodedText:
    """Join the chunks along L, then the text encoders along C; pooled is the last one's first chunk."""
    parts = [[done[call] for call in calls] for calls in text]
    hiddens = [torch.cat([chunk.hidden for chunk in chunks], dim=1) for chunks in parts]
    hidden = hiddens[0] if len(hiddens) == 1 else torch.concat(hiddens, dim=-1)
    return EncodedText(hidden=hidden, pooled=parts[-1][0].pooled)


def _zeros_like(text: EncodedText) -> EncodedText:
    pooled = None if text.pooled is None else torch.zeros_like(text.pooled)
    return EncodedText(hidden=torch.zeros_like(text.hidden), pooled=pooled)
