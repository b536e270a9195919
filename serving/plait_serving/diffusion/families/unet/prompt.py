"""Prompts to text embeddings, computed like diffusers' `encode_prompt`; longer prompts in chunks, never truncated.

A tokenizer of length T (77) holds T - 2 words per chunk between its begin and end tokens. A prompt of more words is
split into several chunks, which are encoded one by one, each alone with its own begin and end, and their embeddings are
joined along L. A prompt that fits into one is encoded by exactly the calls that diffusers makes. Each call is a piece
of work of its own, so that a long prompt holds up nobody's steps.

Legend: L = T * chunks, C text width, P pooled width.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.encoders import Call, EncodedText, Outputs, TextEncoding
from plait_serving.diffusion.families.factors import Kept
from plait_serving.diffusion.families.unet.bundle import UNetBundle
from plait_serving.diffusion.families.unet.config import UNetKind
from plait_serving.diffusion.prompt_syntax import Span, parse
from plait_serving.diffusion.protocols import Conditioning
from plait_serving.diffusion.request_terms import RequestSize, RowKind
from plait_serving.diffusion.values import ImageRequest, PromptSyntax


class Chunk(NamedTuple):
    """The ids of one text encoder call, with begin, end and padding. `weights`, if any is not 1: one for each id."""

    ids: tuple[int, ...]
    weights: tuple[float, ...] | None = None


_Words: TypeAlias = list[tuple[int, float]]
"""The ids of words with their weights."""

_FIELDS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
"""A request's texts."""

_REMEMBERED, _REMEMBERED_BYTES, _WORD_BYTES = 256, 40_000_000, 36
"""Texts whose ids are kept: a prompt is tokenized when its request arrives, and read when it is encoded. So many of 64
chunks are so many bytes; longer ones are refused, or rare."""
_WORD_CHARS = 6
"""What a token is of English, and a space: a text of more than so many for each token it may have is looked at first.
All of 32,000 brackets take a tokenizer 50 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text's chunks for each tokenizer, and its number of words: the max over the tokenizers."""

    chunks: tuple[tuple[Chunk, ...], ...]
    words: int


class PromptTokens:
    """The token ids of a model's prompts, for each of its tokenizers. Thread-safe: requests are measured on the threads
    of their callers, and a tokenizer takes one call at a time. What is known waits for none: the compute thread asks
    for what was measured."""

    def __init__(self, tokenizers: Iterable[Any], *, max_words: int | None = None) -> None:
        """`max_words`: prompts of more will be refused; of one that is far longer only the beginning is read."""
        self._tokenizers = tuple(tokenizers)
        self._max_words = max_words
        self._one_call = threading.Lock()
        self._known: Kept[Tokens] = Kept(_REMEMBERED, _REMEMBERED_BYTES)

    def of(self, text: str, syntax: PromptSyntax = PromptSyntax.PLAIN, *, param: str = "prompt") -> Tokens:
        """Return a text's tokens. Raises `RequestError`, naming `param`, for marks that the syntax does not have, and
        for a text whose beginning alone has too many tokens."""
        return self._known.get((text, syntax), lambda: self._tokenize(text, syntax, param))

    def pair(self, request: ImageRequest) -> tuple[Tokens, Tokens]:
        """Return the tokens of a request's prompt and of its negative prompt."""
        return self._both(request, "prompt"), self._both(request, "negative_prompt")

    def _both(self, request: ImageRequest, name: str) -> Tokens:
        """Return the first tokenizer's chunks of one text and the others' of another."""
        text, syntax = getattr(request, name) or "", request.prompt_syntax
        first = self.of(text, syntax, param=name)
        second = self.of(getattr(request, f"{name}_2") or text, syntax, param=f"{name}_2")
        if first is second:
            return first
        return Tokens(chunks=(*first.chunks[:1], *second.chunks[1:]), words=max(first.words, second.words))

    def _words(self, tokenizer: Any, texts: list[str], param: str) -> list[list[int]]:
        with self._one_call:
            if self._max_words is not None and sum(map(len, texts)) > (most_chars := _WORD_CHARS * self._max_words):
                found = len(word_ids(tokenizer, [" ".join(texts)[:most_chars]])[0])
                if found > 2 * self._max_words:  # its last word may have been cut
                    raise RequestError(f"{found} tokens and more; at most {self._max_words} are read", param=param)
            return word_ids(tokenizer, texts)

    def _tokenize(self, text: str, syntax: PromptSyntax, param: str) -> tuple[Tokens, int]:
        """Return a text's tokens, and their bytes. A break fills the rest of its chunk: that counts as words."""
        spans = parse(text, param) if syntax is PromptSyntax.A1111 else [Span(text, 1.0)]
        chunks = []
        words = 0
        for tokenizer in self._tokenizers:
            room = int(tokenizer.model_max_length) - 2
            parts: list[_Words] = [[]]
            read = self._words(tokenizer, [span.text for span in spans], param)
            for span, ids in zip(spans, read, strict=True):
                if span.breaks:
                    parts.append([])
                parts[-1] += [(word, span.weight) for word in ids]
            cut = [part[i : i + room] for part in parts for i in range(0, max(len(part), 1), room)]
            chunks.append(tuple(_chunk(tokenizer, part) for part in cut))
            words = max(words, room * (len(cut) - 1) + len(cut[-1]))
        return Tokens(chunks=tuple(chunks), words=words), _WORD_BYTES * words * len(chunks)


def word_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of the words of each text, by one call: calls cost more than words."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False).input_ids
    return ids


def _chunk(tokenizer: Any, words: _Words) -> Chunk:
    """Return one chunk with begin, end and padding, which weigh 1."""
    room = int(tokenizer.model_max_length) - 2
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    padding = room - len(words)
    ids = (begin, *[word for word, _ in words], end, *[pad] * padding)
    if all(weight == 1.0 for _, weight in words):
        return Chunk(ids)
    return Chunk(ids, (1.0, *[weight for _, weight in words], 1.0, *[1.0] * padding))


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
        branches, (prompt, negative) = self._branches(request), self.tokens.pair(request)
        read = (prompt, negative) if branches == 2 else (prompt,)
        count = max(len(chunks) for tokens in read for chunks in tokens.chunks)
        width, height, syntax = request.width, request.height, request.prompt_syntax
        return RequestSize(
            words={name: self.tokens.of(getattr(request, name) or "", syntax, param=name).words for name in _FIELDS},
            chunks=len(read) * count,
            shape=(width, height, branches),
            row=RowKind(width * height, branches),
        )

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
