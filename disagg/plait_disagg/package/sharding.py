"""A package's tables on several shards: which shard holds what, and both ends of a lookup.

Nothing is written for it: the plan follows from the package and the number of shards, so every process makes the same
one, and says so in its greeting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.edit import flat_values
from plait_disagg.graph.program import LOOKUP
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package
from plait_disagg.tables.plan import ShardPlan, plan_shards
from plait_disagg.tables.protocols import ShardTables
from plait_disagg.tables.rows_wire import ShardIdentity, identity_of
from plait_disagg.tables.sharded import ShardedTables

_IDS_PER_BAG = 20
"""As many as random requests have where nothing else is known (`plait models package`)."""

_ID_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Into how many shards tables are dealt, and how many bytes of them one may hold (None: any number)."""

    shards: int
    memory_bytes: int | None = None


def plan_of(package: Package, sharding: Sharding) -> ShardPlan:
    """Return who holds which piece of the package's tables. Raises `PackageError` if they do not fit."""
    stored = package.stored
    formats = {name: place.group.format for name, place in stored.places.items()}
    program, ids, rows_of = package.cn, dict[str, float](), set[str]()
    bags = dict.fromkeys(flat_values(program).values(), _IDS_PER_BAG)
    sizes = value_bytes(program, candidates=package.manifest.cut.candidates, ids_per_bag=bags)
    for node in program.nodes:
        if node.op == LOOKUP:
            table = str(node.kwargs["table"])
            ids[table] = ids.get(table, 0.0) + sizes.get(node.parts[0].name, 0) / _ID_BYTES
            rows_of |= {table} if node.kwargs["mode"] == "rows" else set()
    try:
        return plan_shards(
            stored.tables,
            shards=sharding.shards,
            memory_bytes=stored.nbytes if sharding.memory_bytes is None else sharding.memory_bytes,
            lookups_per_request=ids,
            pooled=frozenset(formats) - rows_of,
            formats=formats,
        )
    except ValueError as error:
        raise PackageError(f"{package.folder}: {error}; give it more shards, or shards more memory") from error


def identity(package: Package, plan: ShardPlan, shard: int) -> ShardIdentity:
    """Return what a shard of this plan says of itself."""
    return identity_of(package.manifest.name, package.manifest.version, plan, shard)


def remote_tables(package: Package, plan: ShardPlan, reach: Callable[[ShardIdentity], ShardTables]) -> ShardedTables:
    """Return the package's tables at shards, each made by `reach`. Reads no row."""
    stored = package.stored
    formats = {name: place.group.format for name, place in stored.places.items()}
    shards = [reach(identity(package, plan, number)) for number in range(plan.shards)]
    return ShardedTables(stored.tables, formats, plan, shards)
