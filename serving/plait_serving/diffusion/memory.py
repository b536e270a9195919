"""Whether a model fits in memory, asked before it is loaded. A process that asks too late is killed without a word."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.weight_files import WeightFiles

__all__ = ["MemoryNeed", "available_bytes", "cgroup_bytes", "check_memory", "gigabytes", "pixels_that_fit"]

_log = logging.getLogger(__name__)

PROCESS_BYTES = 500_000_000
"""torch, diffusers and transformers once imported: 0.45 GB were measured."""

CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""A cgroup of version 1 without a limit reports a number near 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What loading and serving a model takes: its weights in their dtype, and an allowance for everything else."""

    weights_bytes: int
    allowance_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.weights_bytes + self.allowance_bytes

    @classmethod
    def of(cls, parts: Iterable[tuple[WeightFiles, torch.dtype]], *, activation_bytes: int = 0) -> MemoryNeed:
        """Return what serving these parts needs; files are memory-mapped, so reading them takes nothing more."""
        weights = sum(files.nbytes_as(dtype) for files, dtype in parts)
        return cls(weights_bytes=weights, allowance_bytes=PROCESS_BYTES + activation_bytes)


def check_memory(name: str, need: MemoryNeed, device: torch.device) -> None:
    """Log what the model needs. Raises `ModelError` if the device has not that much."""
    free = available_bytes(device)
    sentence = (
        f"{name} needs {gigabytes(need.total_bytes)} of memory ({gigabytes(need.weights_bytes)} of weights and "
        f"{gigabytes(need.allowance_bytes)} to work with)"
    )
    if need.total_bytes > free:
        raise ModelError(f"{sentence}; {gigabytes(free)} are available")
    _log.info("%s; %s are available", sentence, gigabytes(free))


def pixels_that_fit(bytes_per_pixel: int, free_bytes: int, *, native: int, limit: int) -> int:
    """Return the pixels of the largest image that can be made with that much memory: never fewer than the model's
    native size has, never more than `limit`."""
    return min(limit, max(native, free_bytes // bytes_per_pixel))


def gigabytes(nbytes: int) -> str:
    """Write a size in decimal gigabytes."""
    return f"{nbytes / 1e9:.2f} GB"


def available_bytes(device: torch.device) -> int:
    """Return what can still be allocated: on a GPU its free memory, else the host's or what the cgroup leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    host = int(psutil.virtual_memory().available)
    return min(host, cgroup_bytes(CGROUPS, _OWN_CGROUPS.read_text() if _OWN_CGROUPS.is_file() else ""))


def cgroup_bytes(root: Path, own: str) -> int:
    """Return what the limits of a process's memory cgroups leave; very much if there is no limit.

    `own` is the text of /proc/self/cgroup. Within a container its paths may be the host's; then the root counts.
    """
    left = [_UNLIMITED]
    for line in own.splitlines():
        parts = line.split(":", 2)  # number, controllers of version 1, path
        if len(parts) == 3 and parts[1] in {"", "memory"}:
            controllers, path = parts[1:]
            top = root / controllers
            folder = top / path.strip().lstrip("/")
            left += [_left(each) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return min(left)


def _left(folder: Path) -> int:
    """Return the limit less what is in use, without the file cache, which the kernel gives up when it must."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        allowed = _number(folder / limit)
        if allowed is not None and allowed < _UNLIMITED:
            return max(0, allowed - (_number(folder / used) or 0) + _statistic(folder / "memory.stat", cache))
    return _UNLIMITED


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        table = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(table.get(name, 0))
    except (OSError, ValueError):
        return 0
