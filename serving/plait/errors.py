"""Errors of the command and of the service around the engine.

PlaitError
├── ConfigError      the configuration is wrong; `problems` names each path
├── OrderError       a command's options cannot be carried out as given
├── StateError       the state folder cannot be used, or another plait holds it
└── ServeError       the server could not be started, or ended by itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class PlaitError(Exception):
    """One sentence for the person at the terminal; the command exits with code 1."""


class ConfigError(PlaitError):
    """The configuration is wrong. `problems`: one `path: what is wrong` each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        super().__init__(f"{source}: " + "; ".join(problems))
        self.problems = tuple(problems)


class OrderError(PlaitError):
    """What is ordered cannot be carried out as given; the message names the option. The command exits with code 2."""


class StateError(PlaitError):
    """The state folder cannot be used, or another plait holds it."""


class ServeError(PlaitError):
    """The server could not be started, or exited by itself."""


@contextmanager
def told(
    *kinds: type[Exception], file: Path | None = None, about: object = "", to: Callable[[str], Exception] = PlaitError
) -> Iterator[None]:
    """Raise these errors as `PlaitError`, or what `to` makes, with their own sentence, after what it is `about`; with a
    `file` those of files too, said of it if they name none. For a block, or as a decorator."""
    try:
        yield
    except kinds as error:
        raise to(f"{about}: {error}" if about else str(error)) from error
    except OSError as error:
        if file is None:
            raise
        raise PlaitError(f"{error.filename or file}: {error.strerror or error}") from error


def read(path: Path) -> str:
    """Read a file that a command was given. Raises `PlaitError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlaitError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def write(path: Path, text: str) -> None:
    """Write a command's file. Raises `PlaitError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlaitError(f"{path} cannot be written: {error.strerror or error}") from error
