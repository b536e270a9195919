"""Training of the starter models: `python -m plait_serving.starter.train`."""
