"""Few numbers of rows, so that programs for one set of shapes are few: 2^k and 3 * 2^k. Pure."""

from __future__ import annotations


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


def row_counts_below(rows: int) -> list[int]:
    """Return those of these numbers that are smaller than `rows`, the largest first."""
    return [n for n in range(rows - 1, 0, -1) if filled_up(n) == n]
