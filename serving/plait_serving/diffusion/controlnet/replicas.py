"""Which replica of a ControlNet a client connects to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from plait_fabric import Channel
from plait_fabric.rpc import replicas as fabric_replicas
from plait_fabric.rpc.replicas import Link, NoReplica, Replica, in_order
from plait_serving.diffusion.errors import ControlNetUnavailable

__all__ = ["Link", "Replica", "connect_to_one", "in_order", "worth_moving"]


def connect_to_one(
    replicas: Sequence[Replica],
    left_out: frozenset[str],
    *,
    host: str,
    chance: random.Random,
    dial: Callable[[str, bytes], Channel],
) -> Link:
    """As `plait_fabric.rpc.replicas.connect_to_one`, but raises `ControlNetUnavailable`."""
    try:
        return fabric_replicas.connect_to_one(replicas, left_out, host=host, chance=chance, dial=dial)
    except NoReplica as error:
        raise ControlNetUnavailable(str(error)) from error


def worth_moving(replicas: Sequence[Replica], current: str, *, chance: random.Random) -> bool:
    """Whether a client of ``current`` should go to another replica, because that has at least two clients fewer.

    Each client of the fuller one decides by lot, so that half of the difference moves and not all at once.
    """
    clients = {replica.name: replica.channels for replica in replicas}
    others = [count for name, count in clients.items() if name != current]
    if current not in clients or not others:
        return False
    difference = clients[current] - min(others)
    return difference >= 2 and chance.random() < difference / (2 * clients[current])
