"""What can go wrong with stored tables and with shards. (An id outside its table is `protocols.BadId`.)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["BadTableFile", "MixedVersions", "ShardLost", "ShardRefused"]


class BadTableFile(Exception):
    """A file is not a table file of ours, or not a whole one; ``field`` says which part of it is wrong."""

    def __init__(self, path: Path, field: str, why: str) -> None:
        super().__init__(f"{path}: {field}: {why}")
        self.path = path
        self.field = field


class ShardLost(Exception):
    """A shard can not be reached, or did not answer in time; another lookup tries to reach it again."""

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"shard {shard}: {why}")
        self.shard = shard


class ShardRefused(Exception):
    """A shard understood the lookup and can not do it: a table that it has not got, say. A mistake of the caller's."""

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"shard {shard}: {why}")
        self.shard = shard


class MixedVersions(Exception):
    """Shards went on answering from different versions of their rows, so that no one lookup is of one version."""

    def __init__(self, versions: Mapping[str, int]) -> None:
        super().__init__("shards answer from different versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()))
        self.versions = versions
