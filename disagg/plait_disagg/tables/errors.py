"""What can go wrong with stored tables and with shards. (An id outside its table is `protocols.BadId`.)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["BadTableFile", "MixedVersions", "ShardLost", "ShardRefused"]


class BadTableFile(Exception):
    """A file is not one of our table files, or not a complete one; `field` names the part of it that is wrong."""

    def __init__(self, path: Path, field: str, why: str) -> None:
        super().__init__(f"{path}: {field}: {why}")
        self.path = path
        self.field = field


class ShardLost(Exception):
    """A shard cannot be reached, or did not answer in time; the next lookup tries to reach it again."""

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"shard {shard}: {why}")
        self.shard = shard


class ShardRefused(Exception):
    """A shard understood the lookup but cannot serve it, say for a table it does not have: a caller's mistake."""

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"shard {shard}: {why}")
        self.shard = shard


class MixedVersions(Exception):
    """Shards kept answering from different versions of their rows, so that no lookup sees a single version."""

    def __init__(self, versions: Mapping[str, int]) -> None:
        super().__init__("shards answer from different versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()))
        self.versions = versions
