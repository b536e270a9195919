"""Prompts to token ids, in chunks: what a text encoder reads at once.

A tokenizer of length T (77) holds T - 2 words per chunk between its begin and end tokens. A prompt of more words is
split into several chunks; nothing is cut off.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plait_serving.diffusion.values import ImageRequest, PromptSize

__all__ = ["Chunk", "PromptTokens", "Tokens", "chunks_of", "word_ids"]

Chunk = tuple[int, ...]
"""The ids of one text encoder call, with begin, end and padding."""

_REMEMBERED = 256
"""Texts whose ids are kept: a prompt is tokenized when its request arrives, and read when it is encoded."""
_MAX_REMEMBERED_CHUNKS = 64
"""Longer texts are refused, or rare: 256 of these are 40 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A text's chunks for each tokenizer, and its number of words: the max over the tokenizers."""

    chunks: tuple[tuple[Chunk, ...], ...]
    words: int


class PromptTokens:
    """The token ids of a model's prompts, for each of its tokenizers. Thread-safe: requests are measured on the threads
    of their callers, and a tokenizer takes one call at a time."""

    def __init__(self, tokenizers: Sequence[Any]) -> None:
        self._tokenizers = tuple(tokenizers)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Tokens] = OrderedDict()

    def of(self, text: str) -> Tokens:
        """Return a text's tokens."""
        with self._lock:
            found = self._known.pop(text, None) or self._tokenize(text)
            if max(map(len, found.chunks)) <= _MAX_REMEMBERED_CHUNKS:
                self._known[text] = found
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return found

    def size(self, request: ImageRequest) -> PromptSize:
        """Return how long a request's prompts are."""
        prompt, negative = self.of(request.prompt), self.of(request.negative_prompt or "")
        read = (prompt, negative) if request.uses_cfg else (prompt,)
        return PromptSize(
            prompt_tokens=prompt.words,
            negative_tokens=negative.words,
            chunks=len(read) * max(len(chunks) for tokens in read for chunks in tokens.chunks),
        )

    def _tokenize(self, text: str) -> Tokens:
        words = [word_ids(tokenizer, text) for tokenizer in self._tokenizers]
        return Tokens(
            chunks=tuple(
                tuple(chunks_of(tokenizer, ids)) for tokenizer, ids in zip(self._tokenizers, words, strict=True)
            ),
            words=max(map(len, words)),
        )


def word_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text's words."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
    return ids


def chunks_of(tokenizer: Any, words: Sequence[int]) -> list[Chunk]:
    """Return every chunk of words, each `model_max_length` long with begin, end and padding; at least one."""
    room = int(tokenizer.model_max_length) - 2
    begin, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    parts = [tuple(words[i : i + room]) for i in range(0, max(len(words), 1), room)]
    return [(begin, *part, end, *[pad] * (room - len(part))) for part in parts]
