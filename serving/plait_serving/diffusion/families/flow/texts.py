"""Text by CLIP and T5: token ids, and one text encoder call at a time.

CLIP reads what fits into its 77 tokens, as in diffusers' pipelines. T5 reads all of a prompt, filled up to a length
that is part of the image, since no mask hides the padding.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.encoders import Call
from plait_serving.diffusion.families.factors import Kept

_REMEMBERED, _REMEMBERED_BYTES, _WORD_BYTES = 256, 40_000_000, 36
"""Texts whose words are kept: a prompt is tokenized when its request arrives, and read when it is encoded. So many of
4,096 words are so many bytes; of 32,000, which are refused, or rare, they would be a third of a GB."""
_WORD_CHARS = 6
"""What a token is of English, and a space: of a text of more than so many for each that there is room for, the
beginning is looked at first. All of 32,000 brackets take a tokenizer 50 ms, and it has no time for others meanwhile."""


class TextTokens:
    """The words of texts, for each of a model's tokenizers, by part. Thread-safe: requests are measured on the threads
    of their callers, and a tokenizer takes one call at a time."""

    def __init__(self, tokenizers: Mapping[str, Any]) -> None:
        self._tokenizers = tokenizers
        self._one_call = threading.Lock()
        self._known: Kept[tuple[int, ...]] = Kept(_REMEMBERED, _REMEMBERED_BYTES)

    def words(self, part: str, text: str) -> tuple[int, ...]:
        """Return the ids of a text's words, without begin, end and padding."""

        def read() -> tuple[tuple[int, ...], int]:
            with self._one_call:
                tokenizer = self._tokenizers[part]
                ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False).input_ids
            return tuple(ids), _WORD_BYTES * len(ids)

        return self._known.get((part, text), read)

    def clip(self, part: str, text: str, skip: int = 0) -> Call:
        """Return the call by which CLIP reads the beginning of a text."""
        tokenizer = self._tokenizers[part]
        length = int(tokenizer.model_max_length)
        ids = (tokenizer.bos_token_id, *self.words(part, text)[: length - 2], tokenizer.eos_token_id)
        return Call(part, (*ids, *[tokenizer.pad_token_id] * (length - len(ids))), skip)

    def t5(self, part: str, text: str, length: int) -> Call:
        """Return the call by which T5 reads a text that fits into so many tokens."""
        tokenizer = self._tokenizers[part]
        ids = (*self.words(part, text)[: length - 1], tokenizer.eos_token_id)
        return Call(part, (*ids, *[tokenizer.pad_token_id] * (length - len(ids))))

    def check_fits(self, part: str, text: str, room: int, *, param: str, hint: str) -> int:
        """Return how many words a text has. Raises `RequestError`, naming `param`, for more than there is room."""
        words, more = len(self.words(part, text[: _WORD_CHARS * room])), " and more"
        if words <= 2 * room:  # the last one may have been cut
            words, more = len(self.words(part, text)), ""
        if words > room:
            raise RequestError(f"{words} tokens{more}; this model reads {room} of them: {hint}", param=param)
        return words
