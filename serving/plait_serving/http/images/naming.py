"""What `model` in a request means: a base model, an alias, or a base model with LoRAs, as `emoji+noto:0.8+pixel`. Pure.

So that every client of OpenAI's API reaches LoRAs, which know no fields but its own. Names may hold a + themselves: of
those that there are, the longest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.values import MAX_SCALE
from plait_serving.http.images.schemas import MAX_LIST, LoraBody
from plait_serving.images.service import BaseModelCard, Catalog
from plait_serving.spelling import hint

__all__ = ["chosen_model"]


def chosen_model(text: str | None, catalog: Catalog) -> tuple[BaseModelCard, list[LoraBody]]:
    """Return the base model and the LoRAs that a request's `model` names. Raises `NotFound` or `RequestError`."""
    if text is None:
        return catalog.model, []
    text = "+".join(map(composed, text.split("+")))  # nothing is composed with a +
    card, alias = catalog.base(text), catalog.alias(text)
    if card is not None:
        return card, []
    if alias is not None:
        return _base(alias.model, catalog), _bodies(alias.loras)
    name, rest = _first(text, [base.name for base in catalog.models if "+" in base.name])
    names = [lora.name for lora in catalog.loras if "+" in lora.name]
    parts: list[str] = []
    while rest is not None and len(parts) <= MAX_LIST:  # more than a set may have
        part, rest = _first(rest, names)
        parts.append(part)
    return _base(name, catalog), _bodies(dict(map(_lora, _once_each(parts))))


def _first(text: str, names: Iterable[str]) -> tuple[str, str | None]:
    """Split a text at its first + that is in none of the names, which have one, that it may begin with; None: there is
    none."""
    whole = [name for name in names if text.startswith(name) and text[len(name) : len(name) + 1] in "+:"]
    end = text.find("+", len(max(whole, key=len, default="")))
    return (text, None) if end < 0 else (text[:end], text[end + 1 :])


def _base(name: str, catalog: Catalog) -> BaseModelCard:
    card = catalog.base(name)
    if card is None and catalog.alias(name) is not None:
        raise RequestError(f"{name!r} is an alias, which takes no more LoRAs; name its model instead", param="model")
    if card is None:
        known = [*(base.name for base in catalog.models), *(alias.name for alias in catalog.aliases)]
        near = hint(name, known) or f"; this server has {', '.join(map(repr, known))}"
        raise NotFound(f"there is no model {name[:100]!r}{near}", param="model")
    return card


def _once_each(parts: list[str]) -> list[str]:
    names = [part.partition(":")[0] for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"LoRA {name[:64]!r} is given twice; add the scales", param="model")
    return parts


def _lora(text: str) -> tuple[str, float]:
    name, colon, scale = text.partition(":")
    try:
        value = float(scale) + 0.0 if colon else 1.0  # no negative zero
    except ValueError:
        value = math.nan
    if not name or not abs(value) <= MAX_SCALE:
        raise RequestError(f"{text[:64]!r} is not NAME or NAME:SCALE", param="model")
    return name, value


def _bodies(loras: Mapping[str, float]) -> list[LoraBody]:
    return [LoraBody.model_construct(name=name, scale=scale) for name, scale in loras.items()]
