"""The checks of `plait doctor`. Each check is a small function that returns findings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from plait.errors import PlaitError

GIB = 1 << 30
# The starter model's server, measured: Ray and Serve 1.1 GiB, ingress 0.2, base replica 0.6, two ControlNets 0.5 each.
NEEDED_MEMORY_BYTES = 3 * GIB
# Ray's object store of the default configuration; images above 100 kB pass through it.
NEEDED_SHM_BYTES = 256 << 20
NEEDED_DISK_BYTES = 1 * GIB


class CheckStatus(StrEnum):
    """OK; WARN: plait runs, with a caveat; FAIL: it will not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    name: str
    verdict: CheckStatus
    detail: str


def examine(environ: Mapping[str, str], *, host: str, port: int, starter: Path) -> list[CheckResult]:
    """Run all checks."""
    checks: Sequence[Callable[[], list[CheckResult]]] = (
        check_python,
        check_packages,
        check_machine,
        lambda: check_home(environ),
        lambda: check_port(host, port),
        lambda: check_starter(starter),
    )
    return [finding for check in checks for finding in check()]


def check_python() -> list[CheckResult]:
    """Check for Python 3.11 or newer on Linux."""
    fine = sys.version_info >= (3, 11) and platform.system() == "Linux"
    return [_finding("python", fine, f"{platform.python_version()} on {platform.system()}")]


def check_packages() -> list[CheckResult]:
    """Check the installed packages against every requirement of the distribution, including its security floors."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("plait") or []]
    except importlib.metadata.PackageNotFoundError:
        return [
            CheckResult(
                "packages", CheckStatus.WARN, "plait itself is not installed (make setup); versions were not compared"
            )
        ]
    bad, versions = [], {}
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            versions[requirement.name] = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            bad.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(versions[requirement.name], prereleases=True):
            bad.append(f"{requirement.name} {versions[requirement.name]} is not {requirement.specifier}")
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers", "ray") if name in versions)
    return [_finding("packages", not bad, "; ".join(bad) or f"{len(versions)} as required ({shown})")]


def check_machine() -> list[CheckResult]:
    """Check cores, memory, shared memory and disk."""
    from plait_fabric.cores import usable_cores

    cores = usable_cores()
    memory = _available_memory_bytes()
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0  # noqa: S108  # Ray's shared memory
    disk = shutil.disk_usage("/tmp").free  # noqa: S108  # Ray's session folder
    return [
        CheckResult("cores", CheckStatus.OK if cores >= 2 else CheckStatus.WARN, f"{cores}"),
        _finding(
            "memory",
            memory >= NEEDED_MEMORY_BYTES,
            f"{memory / GIB:.1f} GiB free, {NEEDED_MEMORY_BYTES / GIB:.0f} needed",
        ),
        CheckResult("shm", _enough(shm, NEEDED_SHM_BYTES), f"{shm / GIB:.2f} GiB free; docker: --shm-size"),
        _finding("/tmp", disk >= NEEDED_DISK_BYTES, f"{disk / GIB:.1f} GiB free"),  # noqa: S108
    ]


def check_home(environ: Mapping[str, str]) -> list[CheckResult]:
    """Report where state is stored; an unusable home is fine, it only moves the state folder."""
    from plait.server.state import state_root

    home = environ.get("HOME", "")
    usable = bool(home) and os.access(home, os.W_OK)
    try:
        root = state_root(environ)
    except PlaitError as error:
        return [CheckResult("state", CheckStatus.FAIL, str(error))]
    note = "" if usable else f" (HOME={home or 'unset'} is not writable)"
    return [CheckResult("state", CheckStatus.OK, f"{root}{note}")]


def check_port(host: str, port: int) -> list[CheckResult]:
    """Check that the port is free, or held by a server that answers `/health`."""
    from plait.server import ports

    try:
        ports.check_port(host, port)
    except PlaitError as error:
        if ports.health(f"http://{host}:{port}", timeout_s=1.0) is None:
            return [CheckResult("port", CheckStatus.OK, f"{port}: a server answers /health there")]
        return [CheckResult("port", CheckStatus.WARN, str(error))]
    return [CheckResult("port", CheckStatus.OK, f"{port} is free on {host}")]


def check_starter(folder: Path) -> list[CheckResult]:
    """Check the starter files against the SHA-256 sums in their manifest."""
    from plait_serving.starter.manifest import files_in, manifest_problems

    try:
        problems = manifest_problems(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems = [f"its manifest cannot be read ({error})"]
    return [
        _finding(
            "starter", not problems, "; ".join(problems[:3]) or f"{len(files_in(folder))} files as in the manifest"
        )
    ]


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _finding(name: str, fine: bool, detail: str) -> CheckResult:
    return CheckResult(name, CheckStatus.OK if fine else CheckStatus.FAIL, detail)


def _enough(found: int, needed: int) -> CheckStatus:
    return CheckStatus.OK if found >= needed else CheckStatus.WARN
