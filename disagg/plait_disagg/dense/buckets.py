"""Batch sizes that share a program, 2^k and 3 * 2^k, and from how many rows on the program pays. Pure."""

from __future__ import annotations

from typing import NamedTuple

_MARGIN = 0.95
"""A program must take at most so much of torch's time: what differs by less is not told apart by a trial."""


def filled_up(rows: int) -> int:
    """Return the smallest of these numbers that is not below `rows`."""
    power = 1 << max(0, rows - 1).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def fewest(rows: int) -> int:
    """Return the fewest rows that are filled up to `rows`, which is one of these numbers."""
    if rows <= 2:
        return rows
    power = 1 << (rows.bit_length() - 1)
    return (power * 3 // 4 if rows == power else power) + 1


class Bucket(NamedTuple):
    """Batches of up to `users` users (1: of a single one) and `rows` candidates, computed by `threads` threads."""

    users: int
    rows: int
    threads: int

    @property
    def fewest_users(self) -> int:
        """The fewest users of a batch that belongs here."""
        return fewest(self.users)

    @property
    def fewest_rows(self) -> int:
        """The fewest candidates of a batch that belongs here; a user has at least one."""
        return max(fewest(self.rows), self.fewest_users)


def bucket_of(users: int, rows: int, threads: int) -> Bucket:
    """Return the bucket of a batch of so many users and candidates."""
    return Bucket(filled_up(users), filled_up(rows), threads)


def pays_from(bucket: Bucket, *, program_s: float, torch_min_s: float, torch_max_s: float) -> int | None:
    """Return the number of rows from which a bucket's program is faster than torch, or None if it never is.

    A program takes `program_s` however many rows of the bucket there are. torch takes `torch_min_s` for the fewest,
    `torch_max_s` for the most, and linearly more between; more for fewer is noise, and then counts for nothing.
    """
    program_s /= _MARGIN
    torch_min_s = min(torch_min_s, torch_max_s)
    if program_s <= torch_min_s:
        return bucket.fewest_rows
    if program_s > torch_max_s:
        return None
    share = (program_s - torch_min_s) / (torch_max_s - torch_min_s)
    return bucket.fewest_rows + round(share * (bucket.rows - bucket.fewest_rows) + 0.5)
