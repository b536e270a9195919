"""Which replica of a service a client connects to, and by which of its addresses. Pure except for the dialling."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plait_fabric import Channel, FabricError


class NoReplica(Exception):
    """No replica can be reached; the message gives the reason for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """The address and secret of one replica. `host` names its machine; it has `channels` clients, and took `start_s` to
    start, if that is known."""

    name: str
    host: str
    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)
    channels: int = 0
    pid: int = 0
    start_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaLink:
    """A fresh channel to a replica, the name by which to leave that replica out next time, and how long it took to
    start."""

    replica: str
    channel: Channel
    start_s: float | None = None


_PREFERRED = ("shm", "nixl")


def _preference(address: str) -> int:
    scheme = address.partition(":")[0]
    return _PREFERRED.index(scheme) if scheme in _PREFERRED else len(_PREFERRED)


def in_order(
    replicas: Sequence[Replica], left_out: frozenset[str], *, host: str, chance: random.Random
) -> list[tuple[Replica, str]]:
    """Return the candidates, best first: fewest clients, then the same machine, then at random.

    Shared memory needs the same machine, and comes first; then one-sided transfers, then TCP.
    """
    candidates = [replica for replica in replicas if replica.name not in left_out]
    chance.shuffle(candidates)
    candidates.sort(key=lambda replica: (replica.channels, replica.host != host))
    return [
        (replica, address)
        for replica in candidates
        for address in sorted(replica.addresses, key=_preference)
        if replica.host == host or not address.startswith("shm:")
    ]


def connect_to_one(
    replicas: Sequence[Replica],
    left_out: frozenset[str],
    *,
    host: str,
    chance: random.Random,
    dial: Callable[[str, bytes], Channel],
) -> ReplicaLink:
    """Connect to the best replica that can be reached.

    `dial` connects to an address with a secret, or raises `FabricError`. Raises `NoReplica`.
    """
    reasons: list[str] = []
    for replica, address in in_order(replicas, left_out, host=host, chance=chance):
        try:
            channel = dial(address, replica.secret)
        except FabricError as error:
            reasons.append(f"{replica.name} at {address}: {error}")
        else:
            return ReplicaLink(replica=replica.name, channel=channel, start_s=replica.start_s)
    raise NoReplica("; ".join(reasons) or "there is no other replica")


def worth_moving(replicas: Sequence[Replica], current: str, *, chance: random.Random) -> bool:
    """Return whether a client of `current` should move to another replica, which has at least two clients fewer.

    Each client of the fuller one decides at random, so that half of the difference moves and not all at once.
    """
    clients = {replica.name: replica.channels for replica in replicas}
    others = [count for name, count in clients.items() if name != current]
    if current not in clients or not others:
        return False
    difference = clients[current] - min(others)
    return difference >= 2 and chance.random() < difference / (2 * clients[current])
