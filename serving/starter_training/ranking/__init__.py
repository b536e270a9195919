"""Training of the starter recommender and of a model of MovieLens: `python -m starter_training.ranking`."""
