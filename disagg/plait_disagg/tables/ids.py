"""Ids that point outside their table, by the table's policy. Ids inside are never touched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plait_disagg.tables.protocols import BadId
from plait_disagg.tables.values import Table

Ids = NDArray[np.int64]


def ids_in_range(ids: Ids, table: Table) -> Ids:
    """Return `ids` (any shape) with every one inside the table; a copy if any was not.

    Raises `BadId` if the policy is error.
    """
    outside = (ids < 0) | (ids >= table.rows)
    if not outside.any():
        return ids
    if table.out_of_range == "error":
        position = int(outside.reshape(-1).argmax())
        raise BadId(table=table.name, value=int(ids.reshape(-1)[position]), position=position, rows=table.rows)
    if table.out_of_range == "clip":
        return ids.clip(0, table.rows - 1)
    return np.where(outside, hash_ids(ids, table.rows), ids)


def hash_ids(ids: Ids, rows: int) -> Ids:
    """Map every id to a row in `0 .. rows - 1`: the finaliser of SplitMix64 on the id's 64 bits, then modulo.

    (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; constants of the reference
    code, https://prng.di.unimi.it/splitmix64.c, with the increment added first, so that 0 does not stay 0.)
    """
    mixed = ids.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(rows)).astype(np.int64)
