"""The starter ranking model `picks`: made-up films, made-up people, and a model that learnt their taste.

::

    from plait_serving.starter.ranking.picks import build, item_names, items

    module, inputs = build()      the trained model and its inputs
    arrays = items()              the item-side inputs of every film, by id
    names = item_names()          "The Crimson Canyon (1968)", ...
"""
