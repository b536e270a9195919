"""Tuning of live services: apply configurations to a clone (or, if requested, to the service itself) and measure
them."""
