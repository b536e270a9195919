"""The films of the starter ranking model: names, genres, years, popularity. All of it is made up.

I films; G genres. The first genre of a film gives it its nouns, so that a list of picks shows its taste.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait_serving.starter.words import GENRES

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

ADJECTIVES = (
    "Silent Crimson Last Hidden Broken Golden Midnight Distant Forgotten Restless Burning Hollow Secret Velvet Iron "
    "Lonely Endless Crooked Electric Frozen Scarlet Wandering Borrowed Paper Northern Second Stolen Gentle Reckless "
    "Blue Quiet Wild"
)

OLDEST, NEWEST = 1930, 2024


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
