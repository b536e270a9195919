"""The prompts of a body: their syntax, the LoRAs in their text, SDXL's second prompts and sizes, and hints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.prompt_syntax import hint_of, parse, take_loras
from plait_serving.diffusion.values import PromptSyntax
from plait_serving.http.images.schemas import GenerationBody, LoraBody

_TEXTS = ("prompt", "negative_prompt", "prompt_2", "negative_prompt_2")
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """`fields`: those of an `ImageRequest`; `loras`: the ones that the prompt names."""

    fields: Mapping[str, Any]
    loras: tuple[LoraBody, ...] = ()


def prompts_of(body: GenerationBody) -> Prompts:
    """Return what a body's prompts are. Raises `RequestError` naming the field."""
    texts: dict[str, Any] = {name: getattr(body, name) for name in _TEXTS}
    fields: dict[str, Any] = {name: _pixels(getattr(body, name), name) for name in ("original_size", "target_size")}
    if body.crop is not None:
        fields["crop"] = (body.crop[0], body.crop[1])
    syntax = PromptSyntax(body.prompt_syntax or "plain")
    loras: tuple[LoraBody, ...] = ()
    if syntax is PromptSyntax.A1111:
        texts["prompt"], found = take_loras(body.prompt, "prompt")
        loras = tuple(LoraBody.model_construct(name=name, scale=scale) for name, scale in found)
        for name, text in texts.items():
            if text is not None:
                parse(text, name)
    return Prompts(fields={**texts, **fields, "prompt_syntax": syntax}, loras=loras)


def hints(body: GenerationBody) -> list[str]:
    """Return what a client may have meant otherwise: marks in prompts that are read to the letter."""
    if body.prompt_syntax is not None:
        return []
    found = [(name, hint_of(getattr(body, name) or "")) for name in _TEXTS]
    return [
        f"{name}: {mark!r} was read to the letter; with prompt_syntax: a1111 it is a mark"
        for name, mark in found
        if mark is not None
    ]


def _pixels(text: str | None, param: str) -> tuple[int, int] | None:
    if text is None:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise RequestError('a size is "WIDTHxHEIGHT" in pixels, for example "1024x1024"', param=param)
    return int(match[1]), int(match[2])
