"""The tokenizer that all published models share: CLIP's, as files. The list of merges is OpenAI's (see NOTICE)."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"
_WORD_END = "</w>"
_MERGES = Path(__file__).with_name("clip_merges.txt.gz")


def byte_symbols() -> list[str]:
    """Return the 256 printable stand-ins of byte-level BPE (GPT-2's table), in the order of CLIP's ids."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(code) for code in plain] + [chr(256 + i) for i in range(256 - len(plain))]


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Return the pairs to merge, by priority."""
    lines = gzip.decompress(_MERGES.read_bytes()).decode().strip().split("\n")
    return tuple((left, right) for left, right in map(str.split, lines))


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
