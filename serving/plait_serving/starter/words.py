"""The words for what the starter models know, for people who type a prompt or choose a user's features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plait_serving.starter.manifest import WEIGHTS

__all__ = ["image_words", "ranking_words"]


def image_words() -> Mapping[str, Any]:
    """Return `concepts`: the names that the base model learned to draw, in the order of its training data."""
    return {"concepts": json.loads((WEIGHTS / "concepts.json").read_text(encoding="utf-8"))}


def ranking_words() -> Mapping[str, Any]:
    """Return `inputs`: for user-side inputs of `picks` whose numbers stand for words, the words by number."""
    from plait_serving.starter.ranking.catalog import GENRES
    from plait_serving.starter.ranking.generate import AGE_BANDS, DAYPARTS

    return {"inputs": {"age_band": AGE_BANDS, "liked_genres": GENRES, "daypart": DAYPARTS}}
