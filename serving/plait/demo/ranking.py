"""The demo's second half: films for two people with different tastes, ranked by the starter model split in two
halves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from plait_serving.starter.words import AGE_BANDS, DAYPARTS, GENRES

MODEL = "picks"
BEST = 5


PostBody: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Posts a body to one route and returns the response's JSON. Raises `ServeError` if the response is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A person whom films are ranked for."""

    who: str
    likes: tuple[str, ...]

    def features(self) -> dict[str, Any]:
        """Return the model's inputs as ids. No film has been seen yet, so only the likes express the taste."""
        likes = [GENRES.index(genre) for genre in self.likes]
        age, daypart = AGE_BANDS.index("35-44"), DAYPARTS.index("evening")
        return {"age_band": age, "liked_genres": likes, "history": [], "daypart": daypart}


PEOPLE = (
    Person(who="one who likes westerns and horror", likes=("western", "horror")),
    Person(who="one who likes music and romance", likes=("music", "romance")),
)


def rank_for_everybody(ask: PostBody, *, say: Callable[[str], None]) -> None:
    """Request each person's best films out of all, and report them and the time taken."""
    for person in PEOPLE:
        body = {"model": MODEL, "user": person.features(), "candidates": "all", "top_k": BEST}
        started_s = time.monotonic()
        answer = ask(body)
        seconds = time.monotonic() - started_s
        say(f"  for {person.who}: {seconds * 1e3:.1f} ms ({_parts(answer['timings'])})")
        for item in answer["items"]:
            say(f"    {item['score']:.3f}  {item['name']}")


def _parts(timings: Mapping[str, float]) -> str:
    """Format the timings as `in the server 3.1: queued 0.1, lookup 0.4, ...`."""
    parts = ", ".join(f"{name.removesuffix('_ms')} {ms:.1f}" for name, ms in timings.items() if name != "total_ms")
    return f"in the server {timings['total_ms']:.1f}: {parts}"


def offers_ranking(url: str) -> bool:
    """Return whether the server at `url` serves the starter recommendation model."""
    import httpx2

    listed = httpx2.get(f"{url}/v1/models", timeout=30.0, trust_env=False).json()["data"]
    return any(model["id"] == MODEL for model in listed)
