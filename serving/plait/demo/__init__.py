"""The implementation of `plait demo`."""
