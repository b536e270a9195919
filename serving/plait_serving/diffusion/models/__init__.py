"""The base models of one engine: what each is, which are in memory, and what makes room for another."""
