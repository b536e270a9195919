"""The limits of the generator and of its machine: which one an error means, and what to do about it."""

from __future__ import annotations

import errno
import resource
from collections.abc import Mapping

from plait_loadtest.scenario import GeneratorLimits

DESCRIPTORS, PORTS, MEMORY = "out of file descriptors", "out of local ports", "out of memory"
ROOM = "limits.connections or limits.in_flight was met"

_OF_ERROR = {
    errno.EMFILE: DESCRIPTORS, errno.ENFILE: DESCRIPTORS, errno.EADDRNOTAVAIL: PORTS,
    errno.ENOMEM: MEMORY, errno.ENOBUFS: MEMORY,
}  # fmt: skip


def limit_of(error: OSError) -> str:
    """Return the limit that an error means; empty: none of this machine's."""
    return _OF_ERROR.get(error.errno or 0, "")


def sentences(met: Mapping[str, int], limits: GeneratorLimits) -> tuple[str, ...]:
    """Return a sentence for each limit that was met: how many requests it held up, and what to do."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hosts = "or share the load among hosts (--part)"
    texts = {
        DESCRIPTORS: f"{{}} requests were not sent; raise ulimit -n, which is {files}, {hosts}",
        PORTS: f"{{}} requests were not sent; widen sysctl net.ipv4.ip_local_port_range, {hosts}",
        MEMORY: f"{{}} requests were not sent; lower the rate, limits.connections or limits.response_bytes, {hosts}",
        ROOM: f"{{}} requests had to wait; raise them, {limits.connections} and {limits.in_flight}, in the scenario",
    }
    return tuple(f"{limit}: {texts[limit].format(count)}" for limit, count in met.items() if count)
