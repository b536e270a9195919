"""What can go wrong with stored tables. (An id outside its table is `protocols.BadId`.)"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BadTableFile"]


class BadTableFile(Exception):
    """A file is not a table file of ours, or not a whole one; ``field`` says which part of it is wrong."""

    def __init__(self, path: Path, field: str, why: str) -> None:
        super().__init__(f"{path}: {field}: {why}")
        self.path = path
        self.field = field
