"""What the machine gives: Python and packages, cores, memory, files, folders that can be written to, the port; and
which addresses the processes of a Ray listen on, and whether they ask for a token."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.doctor.findings import CheckResult, CheckStatus, finding, warning
from plait.errors import PlaitError

if TYPE_CHECKING:
    from plait_kernels.registry import ImplInfo

GIB = 1 << 30
# The starter model's server, measured: Ray and Serve 1.1 GiB, ingress 0.2, base replica 0.6, two ControlNets 0.5 each.
NEEDED_MEMORY_BYTES = 3 * GIB
# Ray's object store of the default configuration; images above 100 kB pass through it.
NEEDED_SHM_BYTES = 256 << 20
NEEDED_DISK_BYTES = 1 * GIB
NEEDED_FILES = 4096
"""Ray warns below it: each process holds sockets to every other."""
_PROGRAMS = ("gcs_server", "raylet", "ray/dashboard", "ray::", "ray/_private", "ray-dashboard")
"""Ray's, as their command lines have them."""
_CACHES = {"XDG_CACHE_HOME": ".cache", "HF_HOME": ".cache/huggingface"}


def check_python() -> list[CheckResult]:
    """Check for Python 3.11 to 3.13 on Linux."""
    fine = (3, 11) <= sys.version_info[:2] <= (3, 13) and platform.system() == "Linux"
    detail = f"{platform.python_version()} on {platform.system()}"
    return [finding("python", fine, detail, "install Python 3.11, 3.12 or 3.13 on Linux")]


def check_packages() -> list[CheckResult]:
    """Check the installed packages against every requirement of the distribution, including its security floors."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("plait") or []]
    except importlib.metadata.PackageNotFoundError:
        detail = "plait itself is not installed; versions were not compared"
        return [warning("packages", False, detail, "install plait with pip")]
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
    detail = "; ".join(bad) or f"{len(versions)} as required ({shown})"
    return [
        finding(
            "packages", not bad, detail, "install plait again with pip, which brings them (floors close published CVEs)"
        )
    ]


def check_operators(device: str, impls: Sequence[ImplInfo] | None = None) -> list[CheckResult]:
    """Check that the operators that are compiled on the machine run on its GPU."""
    import torch

    from plait_kernels.registry import IMPLS, trial_failure

    tried = {impl.op: trial_failure(impl, device, torch.float16) for impl in impls or IMPLS if impl.compiled}
    failed = [f"{op} {reason}" for op, reason in tried.items() if reason is not None]
    detail = "; ".join(failed) or f"compiled and run: {', '.join(tried)}"
    advice = "install gcc and Python's headers (python3-dev), or images take longer"
    return [warning("operators", not failed, detail, advice)]


def check_machine() -> list[CheckResult]:
    """Check cores, memory, shared memory and disk."""
    from plait_kernels.cores import usable_cores

    cores = usable_cores()
    memory = available_memory_bytes()
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0  # noqa: S108  # Ray's shared memory
    disk = shutil.disk_usage("/tmp").free  # noqa: S108  # Ray's session folder
    shown = f"{memory / GIB:.1f} GiB free, {NEEDED_MEMORY_BYTES / GIB:.0f} needed"
    return [
        warning("cores", cores >= 2, f"{cores}", "give it two: one computes, one answers"),
        finding("memory", memory >= NEEDED_MEMORY_BYTES, shown, "stop other programs, or raise the container's limit"),
        warning("shm", shm >= NEEDED_SHM_BYTES, f"{shm / GIB:.2f} GiB free", "docker: --shm-size 1g"),
        finding("/tmp", disk >= NEEDED_DISK_BYTES, f"{disk / GIB:.1f} GiB free", "make room: Ray's session lies there"),  # noqa: S108
    ]


def check_cpu(found: str | None = None) -> list[CheckResult]:
    """Check for the vector instructions that the engine's programs are compiled to."""
    from plait_kernels.cores import instruction_set

    found = found or instruction_set()
    detail = f"{platform.machine()}, instruction set {found}"
    return [warning("cpu", found != "none", detail, "expect images to take several times as long here")]


def check_files() -> list[CheckResult]:
    """Check how many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} open files (up to {hard})"
    return [warning("files", soft >= NEEDED_FILES, detail, f"ulimit -n {max(65536, NEEDED_FILES)}")]


def check_caches(environ: Mapping[str, str]) -> list[CheckResult]:
    """Check that converted models and downloads can be kept."""
    home = Path(environ.get("HOME") or "/nonexistent")
    folders = {name: Path(environ.get(name) or home / usual) for name, usual in _CACHES.items()}
    shut = [f"{folder} ({name})" for name, folder in folders.items() if not _can_write(folder)]
    detail = f"{' and '.join(shut)} cannot be written to" if shut else ", ".join(map(str, folders.values()))
    advice = "set XDG_CACHE_HOME and HF_HOME: without them every start converts its models again"
    return [warning("caches", not shut, detail, advice)]


def check_home(environ: Mapping[str, str]) -> list[CheckResult]:
    """Report where state is stored; an unusable home is fine, it only moves the state folder."""
    from plait.server.state import state_root

    home = environ.get("HOME", "")
    usable = bool(home) and os.access(home, os.W_OK)
    try:
        root = state_root(environ)
    except PlaitError as error:
        return [finding("state", False, str(error), "name a folder of your own with PLAIT_STATE_DIR")]
    note = "" if usable else f" (HOME={home or 'unset'} is not writable)"
    return [CheckResult(name="state", verdict=CheckStatus.OK, detail=f"{root}{note}")]


def check_port(host: str, port: int, *, option: str = "--port") -> list[CheckResult]:
    """Check that the server could listen there, or that one does which is ready; `option` sets the port."""
    from plait.server import ports

    name = option.removeprefix("--")
    try:
        ports.check_port(host, port, option=option)
    except PlaitError as error:
        wrong = ports.health(ports.url_of(host, port), timeout_s=1.0)
        detail = f"{port}: a server answers /health there" if wrong is None else f"{error} (/health: {wrong})"
        advice = f"wait until it is ready, or take another {option} or server.host"
        return [warning(name, wrong is None, detail, advice)]
    return [CheckResult(name=name, verdict=CheckStatus.OK, detail=f"{port} is free on {host}")]


def _can_write(folder: Path) -> bool:
    """Return whether the folder, or the first of its parents that is there, takes a new file; it is tried, since root
    may write by mode where a file system takes nothing."""
    try:  # somebody else's home may not even be looked into
        there = next(each for each in (folder, *folder.parents) if each.exists())
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


def available_memory_bytes() -> int:
    """Return what is available, or what the container's limit leaves."""
    try:
        import torch

        from plait_serving.diffusion.memory import available_bytes
    except ImportError:  # another check says so
        import psutil

        return int(psutil.virtual_memory().available)
    return available_bytes(torch.device("cpu"))


def check_torch(dev: Path = Path("/dev")) -> list[CheckResult]:
    """Check that torch can be imported, that its build fits the machine's GPUs, and that operators compile for them."""
    try:
        import torch
    except ImportError as error:
        return [finding("torch", False, f"cannot be imported: {error}", "install it again")]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    gpus = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if torch.version.cuda is None:
        detail = f"{torch.__version__} ({build} build)" + (f", but there are {', '.join(gpus)}" if gpus else "")
        return [warning("torch", not gpus, detail, "install a CUDA build of torch: these GPUs stay idle")]
    found = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    detail = f"{torch.__version__} ({build} build), devices: {', '.join(found) or 'none'}"
    if not found and gpus:
        detail += f", though there are {', '.join(gpus)}"
    advice = "check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; without GPUs the CPU build saves gigabytes"
    return [warning("torch", bool(found), detail, advice), *(check_operators("cuda") if found else [])]


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
