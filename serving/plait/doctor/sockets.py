"""Which addresses the processes of a Ray on this machine listen on, and whether they ask for a token."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from plait.doctor.findings import CheckResult, finding, warning

_PROGRAMS = ("gcs_server", "raylet", "ray/dashboard", "ray::", "ray/_private", "ray-dashboard")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySocket:
    """A listening TCP socket of one of Ray's processes. `has_token`: whether its environment asks for one; None if that
    cannot be read. `is_ours`: whether `plait serve` started it."""

    pid: int
    program: str
    address: str
    port: int
    has_token: bool | None
    is_ours: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        found = ipaddress.ip_address(self.address.partition("%")[0])
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None  # ::ffff:127.0.0.1
        return (mapped or found).is_loopback


def sockets_findings(listeners: Iterable[RaySocket], *, all_rays: bool = False) -> list[CheckResult]:
    """Return a failure if another machine reaches a socket of a Ray of plait's that asks for no token; a warning if it
    asks, or if the Ray is another program's. `all_rays`: a Ray that plait did not start is what plait runs on, too."""
    listeners = list(listeners)
    outside = [it for it in listeners if not it.is_loopback]
    if not outside:
        inside = f"Ray's {len(listeners)} sockets listen on loopback only"
        return [finding("sockets", True, inside if listeners else "no Ray of this user runs here", "")]
    if open_ones := [it for it in outside if it.has_token is False]:
        advice = "whoever reaches them runs code here: start Ray with RAY_AUTH_MODE=token, or on 127.0.0.1"
        is_plait = all_rays or any(it.is_ours for it in open_ones)
        judge = finding if is_plait else warning
        return [judge("sockets", False, f"{_shown(open_ones)}, and Ray asks for no token", advice)]
    unknown = any(it.has_token is None for it in outside)
    state = "whether Ray asks for a token cannot be read" if unknown else "Ray asks for a token"
    return [
        warning(
            "sockets", False, f"{_shown(outside)}; {state}", "let a firewall or a NetworkPolicy admit the cluster alone"
        )
    ]


def ray_listeners() -> Iterator[RaySocket]:
    """Yield what Ray's processes that this user may look at listen on."""
    import psutil

    for process in psutil.process_iter(["cmdline", "name"]):
        command = " ".join(process.info["cmdline"] or [])[:400]
        program = next((name for name in _PROGRAMS if name in command), None)
        if program is None:
            continue
        try:
            connections = process.net_connections(kind="tcp")
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        has_token, is_ours = _environment(process)
        for one in connections:
            if one.status == psutil.CONN_LISTEN:
                yield RaySocket(
                    pid=process.pid,
                    program=program,
                    address=one.laddr.ip,
                    port=one.laddr.port,
                    has_token=has_token,
                    is_ours=is_ours,
                )


def _environment(process: Any) -> tuple[bool | None, bool]:
    """Return whether the process asks for a token, if that can be read, and whether a run of plait started it."""
    import psutil

    from plait.server.processes import RUN_ID_VARIABLE

    try:
        # A Ray worker writes its title over its environment; the raylet that started it has the same one.
        titled = "".join(process.cmdline()[:1]).startswith("ray::")
        source = next(iter(process.parents()), process) if titled else process
        environ = source.environ()
    except (psutil.AccessDenied, psutil.NoSuchProcess, OSError):
        return None, False
    return environ.get("RAY_AUTH_MODE") == "token", RUN_ID_VARIABLE in environ


def _shown(listeners: Iterable[RaySocket]) -> str:
    """Return the sockets by program, each address once."""
    by_program: dict[str, set[str]] = defaultdict(set)
    for it in listeners:
        address = f"[{it.address}]" if ":" in it.address else it.address
        by_program[it.program].add(f"{address}:{it.port}")
    return "; ".join(
        f"{name} listens on {', '.join(sorted(found)[:3])}" + (" ..." if len(found) > 3 else "")
        for name, found in sorted(by_program.items())
    )
