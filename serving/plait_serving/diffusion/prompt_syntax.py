"""The marks that A1111's users put into prompts: weights, breaks and LoRAs. Pure text, no tokenizer.

`(a)` multiplies the weight of a by 1.1, `[a]` divides it by that, `(a:1.3)` multiplies it by 1.3; brackets nest, and
those that stay open last to the end. A backslash makes the bracket after it ordinary. `BREAK` begins a new chunk.
`<lora:name:0.8>` puts a LoRA into the set. So it is in stable-diffusion-webui, `modules/prompt_parser.py`; its other
marks (prompt editing, alternation, AND) are refused, because as plain text they would silently mean something else.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from plait_serving.diffusion.errors import RequestError

__all__ = ["Span", "hint_of", "parse", "take_loras"]

_ROUND, _SQUARE = 1.1, 1 / 1.1
_MAX_OPEN = 32
_MAX_WEIGHT = 100.0

_MARK = re.compile(r"\\[()\[\]\\]|[(\[\])]|:\s*[+-]?[.\d]+\s*\)")
_BREAK = re.compile(r"\bBREAK\b")
_LORA = re.compile(r"<lora:([^:<>]+)(?::([^:<>]*))?>")
_UNKNOWN = re.compile(r"<[a-z]+:[^<>]*>|(?<!\\)\[[^\[\]():|]*[:|][^\[\]()]*\]|\bAND\b")
_LIKE_MARKS = re.compile(r"\([^()]+:\s*[+-]?[.\d]+\s*\)|\(\([^()]+\)\)|\[[^\[\]]+\]|\bBREAK\b|<lora:[^<>]+>")


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of text and its weight; `breaks`: it begins a new chunk."""

    text: str
    weight: float
    breaks: bool = False


def hint_of(prompt: str) -> str | None:
    """Return the first thing in a plain prompt that looks like a mark, or None."""
    found = _LIKE_MARKS.search(prompt)
    return None if found is None else found[0][:80]


def take_loras(prompt: str, param: str) -> tuple[str, list[tuple[str, float]]]:
    """Return a prompt without its LoRA tags, and their names and scales. Raises `RequestError` naming `param`."""
    loras = []
    for name, scale in _LORA.findall(prompt):
        loras.append((name.strip(), _number(scale or "1", param)))
    return _LORA.sub("", prompt), loras


def parse(prompt: str, param: str) -> list[Span]:
    """Return the pieces of a prompt without LoRA tags; neighbours differ in weight or in `breaks`.

    Raises `RequestError`, naming `param`, for marks that mean nothing here, and for weights beyond +-100.
    """
    unknown = _UNKNOWN.search(prompt)
    if unknown is not None:
        raise RequestError(
            f"{unknown[0][:80]!r} is not supported: weights, BREAK and <lora:name:scale> are", param=param
        )
    pieces: list[tuple[str, float]] = []
    open_round: list[int] = []
    open_square: list[int] = []
    position = 0
    for mark in _MARK.finditer(prompt):
        pieces.append((prompt[position : mark.start()], 1.0))
        position = mark.end()
        text = mark[0]
        if text == "(":
            open_round.append(len(pieces))
        elif text == "[":
            open_square.append(len(pieces))
        elif text.endswith(")") and text[0] != "\\" and open_round:
            _weigh(pieces, open_round.pop(), _ROUND if text == ")" else _number(text[1:-1], param))
        elif text == "]" and open_square:
            _weigh(pieces, open_square.pop(), _SQUARE)
        else:
            pieces.append((text.removeprefix("\\"), 1.0))
        if len(open_round) + len(open_square) > _MAX_OPEN:
            raise RequestError(f"more than {_MAX_OPEN} brackets are open", param=param)
    pieces.append((prompt[position:], 1.0))
    for start in open_round:
        _weigh(pieces, start, _ROUND)
    for start in open_square:
        _weigh(pieces, start, _SQUARE)
    if not all(abs(weight) <= _MAX_WEIGHT for _, weight in pieces):
        raise RequestError(f"a weight is beyond {_MAX_WEIGHT:g}", param=param)
    return _joined(pieces)


def _weigh(pieces: list[tuple[str, float]], start: int, factor: float) -> None:
    pieces[start:] = [(text, weight * factor) for text, weight in pieces[start:]]


def _joined(pieces: list[tuple[str, float]]) -> list[Span]:
    """Join neighbours of one weight, and cut at every BREAK."""
    runs: list[tuple[str, float]] = []
    for text, weight in pieces:
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + text, weight)
        elif text:
            runs.append((text, weight))
    spans = []
    for text, weight in runs:
        first, *rest = _BREAK.split(text)
        if first.strip() or not rest:
            spans.append(Span(first, weight))
        spans += [Span(part, weight, breaks=True) for part in rest]
    return spans or [Span("", 1.0)]


def _number(text: str, param: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > _MAX_WEIGHT:
        raise RequestError(f"{text.strip()[:40]!r} is no number up to {_MAX_WEIGHT:g}", param=param)
    return value
