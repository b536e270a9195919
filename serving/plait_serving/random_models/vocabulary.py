"""A CLIP tokenizer's files without a download: byte pairs by rule instead of by counting a corpus.

As in CLIP's own vocabulary, the first 512 ids are the 256 bytes, alone and at the end of a word, the last two are the
special tokens, and there are 49,408. Between them lie all pairs and triples of letters, inside and at the end of a
word, and the first quadruples that fill the rest. English words take a token for two to three letters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

SIZE = 49_408
LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"
_WORD_END = "</w>"


def byte_symbols() -> list[str]:
    """Return the 256 printable stand-ins of byte-level BPE (GPT-2's table), in the order of CLIP's ids."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(code) for code in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def merges() -> list[tuple[str, str]]:
    """Return the pairs to merge, by priority: as many as make `SIZE` tokens."""
    return list(islice(_pairs(), SIZE - 2 * 256 - 2))


def _pairs() -> Iterator[tuple[str, str]]:
    for end in ("", _WORD_END):
        yield from ((a, b + end) for a, b in product(ascii_lowercase, repeat=2))
    for end in ("", _WORD_END):
        yield from ((a + b, c + end) for a, b, c in product(ascii_lowercase, repeat=3))
    yield from ((a + b, c + d + _WORD_END) for a, b, c, d in product(ascii_lowercase, repeat=4))


def vocabulary() -> dict[str, int]:
    """Return every token with its id."""
    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + _WORD_END for symbol in symbols), *(a + b for a, b in merges()), START, END]
    return {token: i for i, token in enumerate(tokens)}


def write_tokenizer(folder: Path, *, pad_token: str) -> None:
    """Write the files that `CLIPTokenizer.from_pretrained` reads into a new folder."""
    folder.mkdir(parents=True)
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad_token}
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": LENGTH, "do_lower_case": True, **special}
    ranks = "\n".join(["#version: 0.2", *(f"{left} {right}" for left, right in merges())])
    texts = {
        "vocab.json": json.dumps(vocabulary(), ensure_ascii=False),
        "merges.txt": ranks,
        "special_tokens_map.json": json.dumps(special, indent=2),
        "tokenizer_config.json": json.dumps(config, indent=2),
    }
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
