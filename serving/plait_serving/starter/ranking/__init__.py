"""The starter recommender ``picks``: films that do not exist, people who do not exist, and a model that learnt their
taste.

::

    module, inputs = build()      the trained model and what it takes
    arrays = items()              the item-side inputs of every film, by id
    names = item_names()          "The Crimson Canyon (1968)", ...
"""

from plait_serving.starter.ranking.picks import build, item_names, items

__all__ = ["build", "item_names", "items"]
