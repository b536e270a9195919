"""The words for what the starter models know, for people who type a prompt or choose a user's features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from plait_serving.starter.manifest import WEIGHTS

AGE_BANDS = ("under 18", "18-24", "25-34", "35-44", "45-54", "55-64", "65 and over")
DAYPARTS = ("morning", "afternoon", "evening", "night")
GENRES = (
    "action", "adventure", "children", "comedy", "crime", "documentary", "drama", "horror", "music", "romance",
    "science fiction", "western",
)  # fmt: skip


def image_words() -> Mapping[str, Any]:
    """Return `concepts`: the names that the base model learned to draw, in the order of its training data."""
    return {"concepts": json.loads((WEIGHTS / "concepts.json").read_text(encoding="utf-8"))}


def ranking_words() -> Mapping[str, Any]:
    """Return `inputs`: for user-side inputs of `picks` whose numbers stand for words, the words by number."""
    return {"inputs": {"age_band": AGE_BANDS, "liked_genres": GENRES, "daypart": DAYPARTS}}
