"""The marks that A1111's users put into prompts: weights, breaks and LoRAs. Pure text, no tokenizer.

`(a)` multiplies the weight of a by 1.1, `[a]` divides it by that, `(a:1.3)` multiplies it by 1.3; brackets nest, and
those that stay open last to the end. A backslash makes the mark after it ordinary, but not the colon of a weight.
`BREAK` begins a new chunk. `<lora:name:0.8>`, in letters of any case, puts a LoRA into the set. So it is in
stable-diffusion-webui, `modules/prompt_parser.py`; its other marks (prompt editing, alternation, AND) are refused,
whatever is in them, because as plain text they would silently mean something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType

from plait_serving.diffusion.errors import RequestError

_FACTORS = MappingProxyType({"(": 1.1, "[": 1 / 1.1})
_MAX_OPEN = 32
_MAX_MARKS = 2_048
_MAX_BREAKS = 300
"""More than any prompt has tokens for (`LimitsSection`), and few enough to be read in some milliseconds."""
_MAX_WEIGHT = 100.0

_MARK = re.compile(r"(\\(?:[()\[\]\\|]|:(?!\s*[+-]?[.\d]+\s*\)))?|[()\[\]])")
_WEIGHT = re.compile(r":\s*([+-]?[.\d]+)\s*\Z")
_BREAK = re.compile(r"\bBREAK\b")
_LORA = re.compile(r"<lora:([^:<>]+)(?::([^:<>]*))?>", re.IGNORECASE)
_UNKNOWN = re.compile(r"<\w+:[^<>]*[<>]|\bAND\b")
_LIKE_MARKS = re.compile(r"\([^()]+:\s*[+-]?[.\d]+\s*\)|\(\([^()]+\)\)|\[[^\[\]]+\]|\bBREAK\b|(?i:<lora:[^<>]+>)")


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
    loras = [(name.strip(), _number(scale or "1", param)) for name, scale in _LORA.findall(prompt)]
    return _LORA.sub("", prompt), loras


def parse(prompt: str, param: str) -> list[Span]:
    """Return the pieces of a prompt without LoRA tags; neighbours differ in weight or in `breaks`. Linear in the text.

    Raises `RequestError`, naming `param`, for marks that mean nothing here, and for weights beyond +-100.
    """
    unknown = _UNKNOWN.search(prompt)
    if unknown is not None:
        if param != "prompt" and _LORA.fullmatch(unknown[0]):
            raise RequestError(f"{unknown[0][:80]!r} belongs into prompt, as all LoRAs do", param=param)
        raise _unsupported(unknown[0], param)
    pieces = _weighed(prompt, param)
    if not all(abs(weight) <= _MAX_WEIGHT for _, weight in pieces):
        raise RequestError(f"a weight is beyond {_MAX_WEIGHT:g}", param=param)
    spans = _joined(pieces)
    if sum(span.breaks for span in spans) > _MAX_BREAKS:
        raise RequestError(f"more than {_MAX_BREAKS} times BREAK", param=param)
    return spans


def _weighed(prompt: str, param: str) -> list[tuple[str, float]]:
    """Return the text with its weights. A pair of square brackets around a colon or a bar, unless that is in round ones
    of its own, is editing or alternation: it is refused.

    Brackets are numbered as they open, from 1. Round and square ones may cross; those of a kind nest, so each has one
    `outer`, and a text needs to know the innermost of each kind only.
    """
    tokens = [*_MARK.split(prompt, _MAX_MARKS + 1), ""]
    if len(tokens) // 2 - 1 > _MAX_MARKS:
        raise RequestError(f"more than {_MAX_MARKS:,} brackets and backslashes", param=param)
    factors, outer, opened_at = [1.0], [0], [0]
    rounds, squares = [0], [0]  # the open ones
    pieces: list[tuple[str, int, int]] = []
    separators: list[int] = []  # of each colon or bar that no round brackets have hidden, the last bracket before it
    for at in range(0, len(tokens), 2):
        text, mark = tokens[at], tokens[at + 1]
        if mark == ")" and rounds[-1] and ":" in text and (weight := _WEIGHT.search(text)):
            factors[rounds[-1]] = _number(weight[1], param)
            text = text[: weight.start()]
        if text:
            pieces.append((text, rounds[-1], squares[-1]))
            if ":" in text or "|" in text:
                separators.append(len(factors) - 1)
        if mark in _FACTORS:
            kind = rounds if mark == "(" else squares
            outer.append(kind[-1])
            kind.append(len(factors))
            factors.append(_FACTORS[mark])
            opened_at.append(at + 1)
            if len(rounds) + len(squares) - 2 > _MAX_OPEN:
                raise RequestError(f"more than {_MAX_OPEN} brackets are open", param=param)
        elif mark == ")" and rounds[-1]:
            number = rounds.pop()
            while separators and separators[-1] >= number:
                separators.pop()
        elif mark == "]" and squares[-1]:
            number = squares.pop()
            if separators and separators[-1] >= number:
                raise _unsupported("".join(tokens[opened_at[number] : at + 2]), param)
        elif literal := mark.removeprefix("\\"):
            pieces.append((literal, rounds[-1], squares[-1]))
    products = [1.0]
    for number in range(1, len(factors)):
        products.append(products[outer[number]] * factors[number])
    return [(text, products[inner] * products[across]) for text, inner, across in pieces]


def _joined(pieces: Iterable[tuple[str, float]]) -> list[Span]:
    """Join neighbours of one weight, and cut at every BREAK that something follows."""
    spans = []
    for weight, run in groupby(pieces, key=itemgetter(1)):
        first, *rest = _BREAK.split("".join(text for text, _ in run))
        if first.strip() or not rest:
            spans.append(Span(first, weight))
        spans += [Span(part, weight, breaks=True) for part in rest]
    last = max((i for i, span in enumerate(spans) if span.breaks), default=len(spans))
    if not any(span.text.strip() for span in spans[last:]):
        del spans[last:]
    return spans or [Span("", 1.0)]


def _unsupported(text: str, param: str) -> RequestError:
    return RequestError(f"{text[:80]!r} is not supported: weights, BREAK and <lora:name:scale> are", param=param)


def _number(text: str, param: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or abs(value) > _MAX_WEIGHT:
        raise RequestError(f"{text.strip()[:40]!r} is no number up to {_MAX_WEIGHT:g}", param=param)
    return value
