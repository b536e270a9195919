"""The tuner: search space, objective, designers, library of past runs."""
