"""The load generator. It lands with its own issue."""
