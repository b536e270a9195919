"""Shards of tables behind a fabric, all in this process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.plan import ShardPlan
from plait_disagg.tables.protocols import ShardTables
from plait_disagg.tables.remote import RemoteShard, wait_for_shards
from plait_disagg.tables.rows_wire import ShardIdentity, identity_of
from plait_disagg.tables.sharded import ShardedTables
from plait_disagg.tables.values import OutOfRange, Table
from plait_disagg.workers.shard import ShardWorker
from plait_fabric import Listener, listen, new_secret
from plait_fabric.rpc.outages import Backoff
from support.fabric import Replicas
from support.tables import Weights, deal, held_by, joined, make_weights

SECRET = new_secret()
_numbers = itertools.count()


def records(weights: Weights, out_of_range: OutOfRange = "error") -> list[Table]:
    """The tables of those weights."""
    return [
        Table(name=name, rows=weight.shape[0], dim=weight.shape[1], out_of_range=out_of_range)
        for name, weight in weights.items()
    ]


def two_pieces(weights: Weights | None = None) -> ShardPlan:
    """Every table in two pieces, one at each of two shards."""
    return deal(records(make_weights() if weights is None else weights), 2, 2)


def who(number: int, weights: Weights | None = None) -> ShardIdentity:
    """What one of those shards says of itself."""
    return identity_of("shop", "1", two_pieces(weights), number)


def shard(
    number: int,
    *,
    weights: Weights | None = None,
    held: HeldPieces | None = None,
    address: str = "",
    secret: bytes = SECRET,
    listener: Listener | None = None,
) -> ShardWorker:
    """One of those shards, listening at a name of this process unless told otherwise."""
    weights = make_weights() if weights is None else weights
    listener = listener or listen(address or f"inproc://shard-{next(_numbers)}", secret=secret)
    pieces = held or held_by(two_pieces(weights), weights)[number]
    return ShardWorker(who(number, weights), pieces, [listener], version="1")


def reach(
    number: int, *workers: ShardWorker, weights: Weights | None = None, replicas: Replicas | None = None, **options: Any
) -> RemoteShard:
    """Who asks that shard at those replicas, connected."""
    found = replicas or Replicas({worker.addresses[0]: worker.addresses[0] for worker in workers}, secret=SECRET)
    quick = Backoff(first_s=0.02, max_s=0.05)
    made = RemoteShard(found.connect, who(number, weights), replicas=max(1, len(workers)), backoff=quick, **options)
    wait_for_shards([made])
    return made


def merged(
    shards: Sequence[ShardTables], *, weights: Weights | None = None, out_of_range: OutOfRange = "error"
) -> ShardedTables:
    """The tables of `two_pieces` at those two shards, at version 1."""
    weights = make_weights() if weights is None else weights
    made = joined(records(weights, out_of_range), two_pieces(weights), shards)
    made.version = "1"
    return made
