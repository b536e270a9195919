"""Ranking models of the published shapes, and requests for them."""
