"""Training of the starter models: `python -m starter_training`."""
