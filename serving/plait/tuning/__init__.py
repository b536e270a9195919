"""Tuning live services: applies configurations to a clone (or, if told so, to the service itself) and measures them."""
