"""Errors of the command and of the service around the engine.

PlaitError
├── ConfigError      the configuration is wrong; `problems` names each path
├── StateError       the state folder cannot be used, or another plait holds it
└── ServeError       the server could not be started, or ended by itself
"""

from __future__ import annotations

from collections.abc import Sequence


class PlaitError(Exception):
    """One sentence for the person at the terminal; the command exits with code 1."""


class ConfigError(PlaitError):
    """The configuration is wrong. `problems`: one `path: what is wrong` each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.problems = tuple(problems)


class StateError(PlaitError):
    """The state folder cannot be used, or another plait holds it."""


class ServeError(PlaitError):
    """The server could not be started, or exited by itself."""
