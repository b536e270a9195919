"""Prompts to token ids, in chunks: what a text encoder reads at once.

A tokenizer of length T (77) holds T - 2 words per chunk between its begin and end tokens. A prompt of more words is
split into several chunks; nothing is cut off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.factors import Kept
from plait_serving.diffusion.prompt_syntax import Span, parse
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

    def size(self, request: ImageRequest, branches: int) -> RequestSize:
        """Return what a request comes to; the negative prompt is read if there are 2 `branches`."""
        prompt, negative = self.pair(request)
        read = (prompt, negative) if branches == 2 else (prompt,)
        count = max(len(chunks) for tokens in read for chunks in tokens.chunks)
        width, height, syntax = request.width, request.height, request.prompt_syntax
        return RequestSize(
            words={name: self.of(getattr(request, name) or "", syntax, param=name).words for name in _FIELDS},
            chunks=len(read) * count,
            shape=(width, height, branches),
            row=RowKind(width * height, branches),
        )

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
