"""A model's card as plain data, for messages and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait_disagg.graph.inputs import check_inputs, input_from_json, input_to_json
from plait_disagg.values import ModelCard

__all__ = ["card_from_json", "card_to_json"]


def card_to_json(card: ModelCard) -> dict[str, Any]:
    """Return the card as plain data, which `card_from_json` reads back."""
    return {
        "name": card.name,
        "version": card.version,
        "inputs": [input_to_json(item) for item in card.inputs],
        "outputs": {name: list(shape) for name, shape in card.outputs.items()},
        "largest_candidates": card.largest_candidates,
        "items": card.items,
        "mode": card.mode,
        "id_rows": dict(card.id_rows),
        "packaged": card.packaged,
    }


def card_from_json(data: Mapping[str, Any]) -> ModelCard:
    """Parse a card. Raises ValueError if the data is not one."""
    try:
        inputs = tuple(input_from_json(item) for item in data["inputs"])
        card = ModelCard(
            name=str(data["name"]),
            version=str(data["version"]),
            inputs=inputs,
            outputs={str(name): tuple(int(size) for size in shape) for name, shape in data["outputs"].items()},
            largest_candidates=int(data["largest_candidates"]),
            items=None if data["items"] is None else int(data["items"]),
            mode=str(data["mode"]),
            id_rows={str(name): int(rows) for name, rows in data["id_rows"].items()},
            packaged=str(data["packaged"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a model's card: {error!r}") from error
    check_inputs(inputs)
    return card
