"""Several base models in one engine: which are in memory, and what makes room for another."""
