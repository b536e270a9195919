"""The tuner: search space, objective, designers, library of past runs. It lands with its own issue."""
