"""Prompts to text embeddings, computed like diffusers' `encode_prompt`; longer prompts in chunks, never truncated.

A tokenizer of length T (77) holds T - 2 words per chunk between its begin and end tokens. A prompt of more words is
split into several chunks, each encoded alone with its own begin and end, and their embeddings are joined along L.
A prompt that fits is encoded by exactly the calls that diffusers makes.

Legend: L = T * chunks, C text width, P pooled width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from plait_serving.diffusion.bundle import Bundle
from plait_serving.diffusion.model_config import Family
from plait_serving.diffusion.protocols import Conditioning
from plait_serving.diffusion.values import ImageRequest
from plait_serving.diffusion.versions import parameter_version


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedText:
    """`hidden (1, L, C)`; `pooled (1, P)` of the last encoder, from the first chunk, or None."""

    hidden: torch.Tensor
    pooled: torch.Tensor | None


_REMEMBERED = 64
"""The number of texts whose encoding is kept (at most 0.6 MB each for SDXL): negative prompts and retries recur."""


class PromptEncoder:
    """Encodes with the current weights of a bundle's text encoders. Compute thread only."""

    def __init__(self, bundle: Bundle, *, weights_version: Callable[[], int] | None = None) -> None:
        """Take the bundle. `weights_version` must change whenever a text encoder is written to; by default torch's own
        count."""
        self._bundle = bundle
        self._is_xl = bundle.family is Family.SDXL
        self._version = weights_version or parameter_version(*bundle.text_encoders)
        self._known: OrderedDict[tuple[str, int], EncodedText] = OrderedDict()
        self._known_version = self._version()

    def prepare(self, request: ImageRequest) -> Conditioning:
        """Return the request's conditioning, unconditional row first; runs the text encoders."""
        uses_cfg = request.uses_cfg and not self._bundle.embeds_guidance
        negative = request.negative_prompt or ""
        prompts = [negative, request.prompt] if uses_cfg else [request.prompt]
        chunks = max(self.chunk_count(prompt) for prompt in prompts)
        with torch.inference_mode():
            encoded = [self.encode(request.prompt, chunks)]
            if uses_cfg:
                # diffusers' rule where no negative prompt was given: the empty one is encoded like any other.
                absent = request.negative_prompt is None
                zeros = self._is_xl and self._bundle.force_zeros_for_empty_prompt and absent
                encoded.insert(0, _zeros_like(encoded[0]) if zeros else self.encode(negative, chunks))
            text = torch.cat([text.hidden for text in encoded])
            return Conditioning(
                text=text, added=self._added(encoded, request) if self._is_xl else {}, n=request.n, uses_cfg=uses_cfg
            )

    def chunk_count(self, prompt: str) -> int:
        """Return the number of chunks that `prompt` needs: the max over the model's tokenizers, at least 1."""
        return max(len(token_chunks(tokenizer, prompt)) for tokenizer in self._bundle.tokenizers)

    def encode(self, prompt: str, chunks: int) -> EncodedText:
        """Encode `prompt` as exactly `chunks` chunks; chunks that it does not fill are encoded empty. The result is
        cached."""
        version = self._version()
        if version != self._known_version:
            self._known.clear()
            self._known_version = version
        text = self._known.pop((prompt, chunks), None) or self._encode(prompt, chunks)
        self._known[prompt, chunks] = text
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return text

    def _encode(self, prompt: str, chunks: int) -> EncodedText:
        parts = [
            self._encode_with(tokenizer, encoder, prompt, chunks)
            for tokenizer, encoder in zip(self._bundle.tokenizers, self._bundle.text_encoders, strict=True)
        ]
        hidden = parts[0].hidden if len(parts) == 1 else torch.concat([part.hidden for part in parts], dim=-1)
        dtype = cast("Any", self._bundle.text_encoders[-1]).dtype
        return EncodedText(hidden=hidden.to(dtype), pooled=parts[-1].pooled)

    def _encode_with(self, tokenizer: Any, encoder: nn.Module, prompt: str, chunks: int) -> EncodedText:
        ids = token_chunks(tokenizer, prompt)
        empty = token_chunks(tokenizer, "")[0]
        ids = ids + [empty] * (chunks - len(ids))
        outputs = [self._run(encoder, tokenizer, chunk) for chunk in ids]
        hidden = outputs[0].hidden if len(outputs) == 1 else torch.cat([output.hidden for output in outputs], dim=1)
        return EncodedText(hidden=hidden, pooled=outputs[0].pooled)

    def _run(self, encoder: nn.Module, tokenizer: Any, ids: Sequence[int]) -> EncodedText:
        """Encode one chunk as one row: larger batches would round differently from diffusers."""
        tokens = torch.tensor([ids], device=self._bundle.device)
        config = cast("Any", encoder).config
        if self._is_xl:
            output = encoder(tokens, output_hidden_states=True)
            pooled = output[0] if output[0].ndim == 2 else None
            return EncodedText(hidden=output.hidden_states[-2], pooled=pooled)
        mask = _padding_mask(tokens, tokenizer) if getattr(config, "use_attention_mask", False) else None
        return EncodedText(hidden=encoder(tokens, attention_mask=mask)[0], pooled=None)

    def _added(self, encoded: list[EncodedText], request: ImageRequest) -> dict[str, torch.Tensor]:
        """Return SDXL's pooled text and its six sizes: original (h, w), crop (top, left), target (h, w)."""
        pooled = torch.cat([cast("torch.Tensor", text.pooled) for text in encoded])
        size = (request.height, request.width)
        dtype, device = encoded[-1].hidden.dtype, encoded[-1].hidden.device
        time_ids = torch.tensor([[*size, 0, 0, *size]] * len(encoded), dtype=dtype, device=device)
        return {"text_embeds": pooled, "time_ids": time_ids}


def token_chunks(tokenizer: Any, prompt: str) -> list[list[int]]:
    """Return the token ids of every chunk, each `model_max_length` long with begin, end and padding; at least one."""
    length = int(tokenizer.model_max_length)
    words = tokenizer(prompt, add_special_tokens=False, truncation=False, verbose=False).input_ids
    chunks = [words[i : i + length - 2] for i in range(0, max(len(words), 1), length - 2)]
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    return [[begin, *chunk, end, *[pad] * (length - 2 - len(chunk))] for chunk in chunks]


def _padding_mask(tokens: torch.Tensor, tokenizer: Any) -> torch.Tensor:
    """Return 1 up to and including the end token, like the tokenizer's own mask."""
    end = (tokens == tokenizer.eos_token_id).int().argmax(dim=-1)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    mask: torch.Tensor = positions[None] <= end[:, None]
    return mask.long()


def _zeros_like(text: EncodedText) -> EncodedText:
    pooled = None if text.pooled is None else torch.zeros_like(text.pooled)
    return EncodedText(hidden=torch.zeros_like(text.hidden), pooled=pooled)
