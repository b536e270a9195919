"""Shards of tables behind a fabric, all in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import Tables
from plait_disagg.tables.remote import RemoteTables
from plait_disagg.tables.sharded import ShardedTables
from plait_disagg.tables.storage import pack_tables
from plait_disagg.tables.values import OutOfRange, Table
from plait_disagg.workers.shard import ShardWorker
from plait_fabric import connect, listen, new_secret
from support.tables import Weights, deal, make_weights, shard_tables

SECRET = new_secret()
_numbers = itertools.count()
_kept: dict[tuple[str, int, OutOfRange], Tables] = {}


def records(weights: Weights, out_of_range: OutOfRange = "error") -> list[Table]:
    """The tables of those weights."""
    return [
        Table(name=name, rows=weight.shape[0], dim=weight.shape[1], out_of_range=out_of_range)
        for name, weight in weights.items()
    ]


def shard(tables: Tables, served: Sequence[Table], *, address: str = "", version: int = 0) -> ShardWorker:
    """A shard that listens, at a name of this process unless told otherwise."""
    listener = listen(address or f"inproc://shard-{next(_numbers)}", secret=SECRET)
    return ShardWorker(tables, served, [listener], version=version)


def reach(worker: ShardWorker, **options: float) -> RemoteTables:
    """Whoever asks that shard."""
    address = worker.addresses[0]
    return RemoteTables(partial(connect, address, secret=SECRET), name=address, **options)


def remote(weights: Weights, out_of_range: OutOfRange, folder: Path) -> Tables:
    """All tables at one shard. One worker for each set of weights lives as long as the process."""
    key = ("remote", id(weights), out_of_range)
    if key not in _kept:
        worker = shard(FusedTables(pack_tables(weights, out_of_range=out_of_range)), records(weights, out_of_range))
        _kept[key] = reach(worker)
    return _kept[key]


def merged(shards: Sequence[Tables]) -> ShardedTables:
    """The tables of `make_weights`, every one in two pieces, at those two shards."""
    tables = records(make_weights())
    return ShardedTables(tables, deal(tables, 2, 2), shards)


def pieces_of(number: int, weights: Weights | None = None) -> tuple[Tables, list[Table]]:
    """What one of those shards holds, and its names."""
    weights = make_weights() if weights is None else weights
    plan = deal(records(weights), 2, 2)
    served = [Table(name=piece.name, rows=piece.rows, dim=piece.columns) for piece in plan.of_shard(number)]
    return shard_tables(plan, weights)[number], served


def sharded_remote(weights: Weights, out_of_range: OutOfRange, folder: Path) -> Tables:
    """Every table in two pieces, one at each of two shards; kept as `remote` keeps."""
    key = ("shards", id(weights), out_of_range)
    if key not in _kept:
        tables = records(weights, out_of_range)
        workers = [shard(*pieces_of(number, weights)) for number in range(2)]
        _kept[key] = ShardedTables(tables, deal(tables, 2, 2), [reach(worker) for worker in workers])
    return _kept[key]
