"""Where a replica is, as it reports to Serve's controller: numbers only, since Serve carries nothing else.

A node is known by the first 13 hexadecimal digits of its id (52 bits, exact in a float), devices by a bit each.
"""

from __future__ import annotations

from collections.abc import Mapping

NODE, DEVICES, CPUS, GPUS = "plait_node", "plait_devices", "plait_cpus", "plait_gpus"
"""Names of the values among a replica's autoscaling statistics."""
_DIGITS = 13


def whereabouts() -> dict[str, float]:
    """Return the node of this actor, what it reserves there, and the devices that Ray gave it, by number."""
    import ray

    context = ray.get_runtime_context()
    reserved = context.get_assigned_resources()
    found = {
        NODE: node_number(context.get_node_id()),
        CPUS: float(reserved.get("CPU", 0.0)),
        GPUS: float(reserved.get("GPU", 0.0)),
    }
    devices = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
    if all(each.isdecimal() and int(each) < _DIGITS * 4 for each in devices):  # else they are named, not numbered
        found[DEVICES] = float(sum(1 << int(each) for each in devices))
    return found


def node_number(node_id: str) -> float:
    """Return the number that stands for a node of Ray."""
    return float(int(node_id[:_DIGITS], 16))


def devices_in(said: Mapping[str, float]) -> tuple[int, ...] | None:
    """Return the devices that a replica reported; None if they have no numbers."""
    if DEVICES not in said:
        return None
    bits = int(said[DEVICES])
    return tuple(device for device in range(bits.bit_length()) if bits >> device & 1)
