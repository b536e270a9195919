"""The prompts of a body: their syntax, the LoRAs in their text, and hints."""

from __future__ import annotations

from plait_serving.diffusion.prompt_syntax import hint_of, parse, take_loras
from plait_serving.diffusion.values import PromptSyntax
from plait_serving.http.images.schemas import GenerationBody, LoraBody

_TEXTS = ("prompt", "negative_prompt", "prompt_2", "negative_prompt_2")


def read_prompts(body: GenerationBody) -> tuple[str, list[LoraBody]]:
    """Return the prompt and the LoRAs that it names. Raises `RequestError` naming the field whose marks are wrong."""
    if body.prompt_syntax is not PromptSyntax.A1111:
        return body.prompt, []
    prompt, loras = take_loras(body.prompt, "prompt")
    for name in _TEXTS:
        if text := prompt if name == "prompt" else getattr(body, name):
            parse(text, name)
    return prompt, [LoraBody.model_construct(name=name, scale=scale) for name, scale in loras]


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
