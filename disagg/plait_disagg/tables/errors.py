"""What can go wrong with stored tables and with shards. (An id outside its table is `protocols.BadId`.)"""

from __future__ import annotations

from pathlib import Path


class BadTableFile(Exception):
    """A file is not one of our table files, or not a complete one; `field` names the part of it that is wrong."""

    def __init__(self, path: Path, field: str, why: str) -> None:
        super().__init__(f"{path}: {field}: {why}")


class ShardLost(Exception):
    """No replica of a shard can be reached, or none answered in time; one may answer again after `back_in_s`."""

    def __init__(self, shard: str, why: str, *, back_in_s: float | None = None) -> None:
        super().__init__(f"{shard}: {why}")
        self.back_in_s = back_in_s


class ShardRefused(Exception):
    """A shard understood the lookup but cannot serve it, say for a piece that it does not have: a mistake of ours."""

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"{shard}: {why}")


class OtherVersion(Exception):
    """A shard has another version of the rows than it was asked for: a refresh is on its way. Ask again."""

    def __init__(self, shard: str, *, asked: str, has: str) -> None:
        super().__init__(f"{shard} has version {has}, not {asked}")
