"""Films, people and their clicks, by a planted law. All of it is made up.

U people, I films, G genres, S styles. A person has an age band, two to four favourite genres and a hidden liking for
styles; a film has genres and a hidden style. The law of a click of person u on film i at daypart d:

    logit = (taste_u + habit_d) . genres_i / sqrt(genres of i) + 0.4 style_u . style_i
            + quality_i + near(year_i, youth_u) - 3.2

The model sees neither taste, nor style, nor quality: only the genres that a person claims to like (most favourites,
occasionally something else), what they clicked before, and the films' public features. So no model can reach the
law's own AUC.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait_serving.starter.ranking.picks import LONGEST_HISTORY
from plait_serving.starter.words import AGE_BANDS, DAYPARTS, GENRES

NOUNS = {
    "action": "Chase Strike Bullet Escape Convoy Blast Pursuit Hostage Raid Countdown Heist Ambush",
    "adventure": "Expedition Island Compass Treasure Voyage Jungle Summit Caravan Map River Lagoon Relic",
    "children": "Puppy Balloon Teddy Treehouse Snowman Pirate Dragon Circus Kite Pumpkin Penguin Wizard",
    "comedy": "Wedding Neighbour Landlord Holiday Moustache Uncle Reunion Waiter Picnic Twins Hamster Bachelor",
    "crime": "Alibi Detective Witness Ransom Verdict Suspect Swindle Informer Safe Jury Motive Gang",
    "documentary": "Glacier Harvest Archive Orchestra Reef Factory Election Migration Bridge Marathon Desert Bees",
    "drama": "Letter Harbour Promise Winter Daughter Inheritance Silence Farewell Mirror Garden Orchard Return",
    "horror": "Cellar Graveyard Whisper Asylum Scarecrow Fog Crypt Doll Swamp Mansion Shadow Ritual",
    "music": "Melody Rehearsal Trumpet Ballad Jukebox Encore Drummer Chorus Waltz Cabaret Fiddle Overture",
    "romance": "Kiss Sunset Bouquet Valentine Serenade Promenade Rose Balcony Sweetheart Dance Locket Rendezvous",
    "science fiction": "Android Orbit Nebula Clone Starship Signal Colony Paradox Satellite Robot Comet Wormhole",
    "western": "Canyon Saddle Sheriff Outlaw Stagecoach Ranch Gunslinger Saloon Mustang Frontier Prairie Duel",
}
"""The first genre of a film gives it its nouns, so that a list of picks shows its taste."""

ADJECTIVES = (
    "Silent Crimson Last Hidden Broken Golden Midnight Distant Forgotten Restless Burning Hollow Secret Velvet Iron "
    "Lonely Endless Crooked Electric Frozen Scarlet Wandering Borrowed Paper Northern Second Stolen Gentle Reckless "
    "Blue Quiet Wild"
)

OLDEST, NEWEST = 1930, 2024

_STYLES = 4
_STYLE = 0.4
_BIAS = -3.2
_AGES = np.array([14, 21, 30, 40, 50, 60, 72])
_SEEN_BEFORE = 80
"""The number of films that a person was shown before; the clicked ones, latest `LONGEST_HISTORY`, are the history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmCatalog:
    """The films by id. `genres` (I, G) bool; `year` (I,) int64; `popularity` (I,) float64.

    Popularity is how well known a film is: evenly spread, 1 for the best known.
    """

    names: tuple[str, ...]
    genres: NDArray[np.bool_]
    year: NDArray[np.int64]
    popularity: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.names)


def make_catalog(size: int = 2000) -> FilmCatalog:
    """Make `size` films (at most 6,000: titles run out), always the same. Newer ones are more frequent."""
    rng = np.random.default_rng([0, 1])
    first = rng.integers(0, len(GENRES), size)
    genres = np.zeros((size, len(GENRES)), dtype=bool)
    genres[np.arange(size), first] = True
    for film in range(size):
        genres[film, rng.choice(len(GENRES), rng.integers(0, 3), replace=False)] = True
    year = NEWEST - np.minimum(rng.exponential(22.0, size).astype(np.int64), NEWEST - OLDEST)
    titles = _titles(first, rng)
    return FilmCatalog(
        names=tuple(f"{title} ({one})" for title, one in zip(titles, year, strict=True)),
        genres=genres,
        year=year,
        popularity=1.0 - rng.permutation(size) / size,
    )


def _titles(first_genre: NDArray[np.int64], rng: np.random.Generator) -> list[str]:
    """Return a title for each film, no two alike: "The Crimson Canyon", "Crimson Canyon"."""
    stock = {}
    for index, genre in enumerate(GENRES):
        pairs = [f"{adjective} {noun}" for adjective in ADJECTIVES.split() for noun in NOUNS[genre].split()]
        titles = [f"The {pair}" for pair in pairs] + pairs
        stock[index] = [titles[place] for place in rng.permutation(len(titles))]
    return [stock[int(genre)].pop() for genre in first_genre]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clicks:
    """What U people were shown: N films each, all at once. Histories and likings are padded with -1 on the right.

    `age_band`, `daypart` (U,), `liked_genres` (U, G), `history` (U, H), `item` (U, N) int64; `label` (U, N) bool;
    `law` (U, N) float64: the planted logit.
    """

    age_band: NDArray[np.int64]
    daypart: NDArray[np.int64]
    liked_genres: NDArray[np.int64]
    history: NDArray[np.int64]
    item: NDArray[np.int64]
    label: NDArray[np.bool_]
    law: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.age_band)


def make_clicks(catalog: FilmCatalog, people: int, *, shown: int = 30, seed: int = 0) -> Clicks:
    """Generate the people of this seed and their clicks. The law is the catalogue's, whatever the seed."""
    rng = np.random.default_rng([seed, 2])
    age_band = rng.choice(len(AGE_BANDS), people, p=[0.1, 0.2, 0.22, 0.18, 0.14, 0.1, 0.06])
    daypart = rng.integers(0, len(DAYPARTS), people)
    favourites = _favourites(people, rng)
    taste = favourites * 2.0 + rng.normal(0, 0.25, favourites.shape) + _age_taste()[age_band]
    style = rng.normal(0, 1, (people, _STYLES))

    weights = 0.05 + catalog.popularity**3
    item = rng.choice(len(catalog), (people, _SEEN_BEFORE + shown), p=weights / weights.sum())
    before, now = item[:, :_SEEN_BEFORE], item[:, _SEEN_BEFORE:]
    rng_of_films = np.random.default_rng([len(catalog), 3])  # styles and qualities are the catalogue's alone
    styles = rng_of_films.normal(0, 1, (len(catalog), _STYLES))
    quality = rng_of_films.normal(0, 0.5, len(catalog)) + catalog.popularity
    genres = catalog.genres / np.sqrt(catalog.genres.sum(1, keepdims=True))
    youth = 2024 - _AGES[age_band] + 20

    def law(item: NDArray[np.int64], daypart: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the logits (U, N) for items (U, N)."""
        liking = np.einsum("ung,ug->un", genres[item], taste + _habits()[daypart])
        styled = np.einsum("uns,us->un", styles[item], style)
        near = np.exp(-(((catalog.year[item] - youth[:, None]) / 12.0) ** 2))
        return np.asarray(liking + _STYLE * styled + quality[item] + near + _BIAS)

    earlier, logits = law(before, rng.integers(0, len(DAYPARTS), people)), law(now, daypart)
    return Clicks(
        age_band=age_band,
        daypart=daypart,
        liked_genres=_padded(_said_likings(favourites, rng), len(GENRES)),
        history=_clicked(before, _happens(earlier, rng)),
        item=now,
        label=_happens(logits, rng),
        law=logits,
    )


def _favourites(people: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return (U, G): 1 for two to four favourites of each person, else 0."""
    rank = rng.random((people, len(GENRES))).argsort(1).argsort(1)
    return np.asarray(rank < rng.integers(2, 5, (people, 1)), dtype=np.float64)


def _said_likings(favourites: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return the genres that people claim to like: a favourite in four of five cases, any other in one of thirty."""
    draws = rng.random(favourites.shape)
    return np.where(favourites > 0, draws < 0.8, draws < 1 / 30)


def _age_taste() -> NDArray[np.float64]:
    """Return (bands, G): the young like action and science fiction more, the old westerns, music and documentaries."""
    young = _weights({"action": 0.6, "science fiction": 0.5, "horror": 0.5, "children": 0.3})
    old = _weights({"western": 0.7, "music": 0.5, "documentary": 0.6, "drama": 0.4})
    share = np.linspace(1, 0, len(AGE_BANDS))[:, None]
    return np.asarray(share * young + (1 - share) * old)


def _habits() -> NDArray[np.float64]:
    """Return (dayparts, G): which genres are preferred at which daypart."""
    morning = _weights({"children": 0.8, "documentary": 0.5, "horror": -1.0})
    afternoon = _weights({"comedy": 0.4, "adventure": 0.4})
    evening = _weights({"drama": 0.4, "crime": 0.5, "romance": 0.3})
    night = _weights({"horror": 0.9, "science fiction": 0.4, "children": -1.2})
    return np.stack([morning, afternoon, evening, night])


def _weights(by_genre: dict[str, float]) -> NDArray[np.float64]:
    return np.array([by_genre.get(genre, 0.0) for genre in GENRES])


def _happens(logits: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.bool_]:
    return np.asarray(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)))


def _clicked(item: NDArray[np.int64], clicked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return (U, H): the latest clicked films, oldest first, padded with -1 on the right."""
    latest = clicked & (np.cumsum(clicked[:, ::-1], axis=1)[:, ::-1] <= LONGEST_HISTORY)
    place = _padded(latest, LONGEST_HISTORY)
    return np.where(place < 0, -1, np.take_along_axis(item, place, 1))


def _padded(chosen: NDArray[np.bool_], width: int) -> NDArray[np.int64]:
    """Return (U, width): the chosen columns of each row, padded with -1 on the right."""
    order = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
    return np.where(np.take_along_axis(chosen, order, 1), order, -1)
