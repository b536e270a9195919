"""Everything of a model's folder but its weights: configurations, tokenizers, scheduler and index, as data says."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import diffusers
import torch
from torch import nn

from plait_serving.diffusion.published.architectures import T5, Architecture, ModelPart, tokenizer_of


def build_on_meta(part: ModelPart) -> nn.Module:
    """Return the module without memory for its weights."""
    import transformers

    with torch.device("meta"):
        if part.library == "diffusers":
            return cast("nn.Module", getattr(diffusers, part.class_name)(**part.config))
        kind = getattr(transformers, part.class_name)
        return cast("nn.Module", kind(kind.config_class(**part.config)))


def published_name(name: str) -> str:
    """Return the name of a CLIP encoder's weight or module in files: transformers 5 dropped `text_model.` from the
    class, files keep it."""
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"


def stored(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a part's weights by the names that they have in files: one that a module has twice is there once."""
    of_clip = type(module).__name__.startswith("CLIP")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not any(tensor is other for other in found.values()):
            found[published_name(name) if of_clip else name] = tensor
    return found


def write_configs(architecture: Architecture, folder: Path, modules: Mapping[str, nn.Module]) -> None:
    """Write them into a folder that exists; `modules`: each part's, by its folder."""
    for part in architecture.parts:
        place = folder / part.folder
        place.mkdir(exist_ok=True)
        _write_config(place, part, modules[part.folder])
        if part.class_name == T5:
            write_t5_tokenizer(folder / tokenizer_of(part))
    for name, pad_token in architecture.pad_tokens.items():
        write_tokenizer(folder / name, pad_token=pad_token)
    if (scheduler := architecture.scheduler) is not None:
        kind = getattr(diffusers, scheduler.class_name)
        kind.from_config(dict(scheduler.config)).save_pretrained(folder / scheduler.folder)
        index = json.dumps(_index(architecture, scheduler), indent=2)
        (folder / "model_index.json").write_text(index + "\n", encoding="utf-8")


def _write_config(place: Path, part: ModelPart, module: nn.Module) -> None:
    """Write `config.json` as the part's own library does, with the defaults filled in."""
    config: Any = module.config
    if part.library == "diffusers":
        module.save_config(place)  # type: ignore[operator]
        return
    # float32 is what to compute in if nothing else is asked for: Stable Diffusion 1's own file says so, too.
    config.update({"architectures": [part.class_name], "dtype": "float32"})
    config.save_pretrained(place)


def _index(architecture: Architecture, scheduler: ModelPart) -> dict[str, Any]:
    parts = {part.folder: [part.library, part.class_name] for part in architecture.parts}
    tokenizers = {name: ["transformers", "CLIPTokenizer"] for name in architecture.pad_tokens}
    tokenizers |= {
        tokenizer_of(part): ["transformers", "T5TokenizerFast"] for part in architecture.parts if part.class_name == T5
    }
    return {
        "_class_name": architecture.pipeline,
        "_diffusers_version": diffusers.__version__,
        **architecture.index,
        **parts,
        **tokenizers,
        scheduler.folder: [scheduler.library, scheduler.class_name],
    }


LENGTH = 77
START, END = "<|startoftext|>", "<|endoftext|>"
_WORD_END = "</w>"
_MERGES = Path(__file__).with_name("clip_merges.txt.gz")


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Return the pairs to merge, by priority."""
    lines = gzip.decompress(_MERGES.read_bytes()).decode().strip().split("\n")
    return tuple((left, right) for left, right in map(str.split, lines))


def vocabulary() -> dict[str, int]:
    """Return every token with its id: first the 256 printable stand-ins of byte-level BPE, GPT-2's table."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = list(bytes_to_unicode().values())
    tokens = [*symbols, *(symbol + _WORD_END for symbol in symbols), *(a + b for a, b in merges()), START, END]
    return {token: i for i, token in enumerate(tokens)}


def write_tokenizer(folder: Path, *, pad_token: str) -> None:
    """Write the files that `CLIPTokenizer.from_pretrained` reads into a new folder.

    All published models share CLIP's tokenizer; the list of merges is OpenAI's (see NOTICE).
    """
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


_T5_LENGTH, _T5_PIECES = 512, 32_000


def write_t5_tokenizer(folder: Path) -> None:
    """Write the files that `T5TokenizerFast.from_pretrained` reads into a new folder.

    Its pieces are CLIP's, as many as T5 has: a random T5 gives none of them a meaning, and about as many tokens make a
    prompt.
    """
    from transformers import T5TokenizerFast

    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    single = ["▁", *characters, *(f"▁{character}" for character in characters)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((piece, -20.0) for piece in single)]
    words = dict.fromkeys(piece for pair in merges() if (piece := _as_piece("".join(pair))))
    room = _T5_PIECES - len(pieces)
    pieces += [(piece, -1.0 - 9.0 * rank / room) for rank, piece in enumerate(list(words)[:room])]
    T5TokenizerFast(vocab=pieces, model_max_length=_T5_LENGTH).save_pretrained(folder)


def _as_piece(token: str) -> str | None:
    """Return a token of CLIP's as SentencePiece writes it: what ends a word there begins one here; None: it is no
    text of its own."""
    plain = token.removesuffix(_WORD_END)
    return (plain if plain == token else f"▁{plain}") if plain.isascii() else None
