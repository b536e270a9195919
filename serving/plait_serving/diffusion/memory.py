"""Whether a model fits in memory, asked before it is loaded. A process that asks too late is killed without a word."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import torch

from plait_kernels.cores import has_bfloat16, instruction_set
from plait_kernels.devices import allocated_bytes, default_device, free_bytes, is_gpu
from plait_kernels.executors.graphs import give_back, pool_bytes
from plait_kernels.heap import return_memory
from plait_serving.diffusion.errors import ModelError

_log = logging.getLogger(__name__)

PROCESS_BYTES = 500_000_000
"""torch, diffusers and transformers once imported: 0.45 GB were measured."""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""A cgroup of version 1 without a limit reports a number near 2**63."""
_STATM = Path("/proc/self/statm")
_MONITORED_SHARE = "0.95"
"""Ray's default: where more of a host's or a container's memory is in use, its memory monitor ends workers."""


def resolve_device(device: str) -> str:
    """Return what "auto" means here: CUDA if available, otherwise the CPU."""
    return default_device() if device == "auto" else device


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return what "auto" means on a device: float16 on a GPU, otherwise float32."""
    if dtype != "auto":
        return cast("torch.dtype", getattr(torch, dtype))
    return torch.float16 if is_gpu(device) else torch.float32


@functools.cache
def warn_of_emulation() -> None:
    """Log, once a process, that the CPU has no instructions for bfloat16, if it has none."""
    if not has_bfloat16():
        _log.warning(
            "images.dtype is bfloat16, for which this CPU (%s) has no instructions: steps take many times as long as "
            "in float32; leave the dtype out",
            instruction_set(),
        )


def check_memory(name: str, weights_bytes: int, device: torch.device, *, working_bytes: int = 0) -> None:
    """Log what a model needs: its weights in their dtype, what the libraries take, and what working with it does. Files
    are memory-mapped, so reading them takes nothing more. Raises `ModelError` if the device has not that much."""
    free, beside_bytes = available_bytes(device), PROCESS_BYTES + working_bytes
    sentence = (
        f"{name} needs {gigabytes(weights_bytes + beside_bytes)} of memory ({gigabytes(weights_bytes)} of weights and "
        f"{gigabytes(beside_bytes)} to work with)"
    )
    if weights_bytes + beside_bytes > free:
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
    """Return what can still be allocated: on a GPU its free memory and what torch keeps there unused, but for graphs;
    else the host's or what the cgroup leaves, before Ray's memory monitor ends processes."""
    if is_gpu(device):
        return max(0, free_bytes(device) - pool_bytes(device))
    share = _monitored_share()
    host = psutil.virtual_memory()
    left = max(0, int(host.available - (1 - share) * host.total))
    return min(left, cgroup_bytes(CGROUPS, _text(OWN_CGROUPS), share=share))


def _monitored_share() -> float:
    """Return the share of all memory that may be in use: Ray reads the same variables."""
    if os.environ.get("RAY_memory_monitor_refresh_ms") == "0":  # noqa: SIM112
        return 1.0
    return float(os.environ.get("RAY_memory_usage_threshold", _MONITORED_SHARE))  # noqa: SIM112


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReader:
    """How a process reads its memory, in bytes; by default it is not read. `held_bytes`: what it holds that no file
    backs; `left_bytes`: what can still be allocated; `give_back` returns what was freed to the system."""

    held_bytes: Callable[[], int] = lambda: 0
    left_bytes: Callable[[], int] = lambda: _UNLIMITED
    give_back: Callable[[], None] = lambda: None


def memory_of(device: torch.device, *, excluded: Callable[[], int]) -> MemoryReader:
    """Return the reader of this process's memory on a device. `excluded`: bytes of the host's that do not count."""
    if is_gpu(device):
        return MemoryReader(
            held_bytes=lambda: allocated_bytes(device),
            left_bytes=lambda: available_bytes(device),
            give_back=lambda: _give_back(device),
        )
    return MemoryReader(
        held_bytes=lambda: _own_bytes() - excluded(),
        left_bytes=lambda: available_bytes(device),
        give_back=return_memory,
    )


def _give_back(device: torch.device) -> None:
    gc.collect()  # modules that refer to each other go late
    give_back(device)


def _own_bytes() -> int:
    """Return the anonymous memory of this process, which is its proportional set size without files; 0 where the system
    does not say. `smaps_rollup` says the same, but walks all pages: some 10 ms for each GB."""
    _, resident, shared, *_ = map(int, (_text(_STATM) or "0 0 0").split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def cgroup_bytes(root: Path, own: str, *, share: float = 1.0) -> int:
    """Return what the limits of a process's memory cgroups leave, if that share of them may be used; very much if there
    is no limit.

    `own` is the text of /proc/self/cgroup. Within a container its paths may be the host's; then the root counts.
    """
    left = [_UNLIMITED]
    for line in own.splitlines():
        parts = line.split(":", 2)  # number, controllers of version 1, path
        if len(parts) == 3 and parts[1] in {"", "memory"}:
            controllers, path = parts[1:]
            top = root / controllers
            folder = top / path.strip().lstrip("/")
            left += [_left(each, share) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return min(left)


def _left(folder: Path, share: float) -> int:
    """Return that share of the limit less what is in use, without the file cache, which the kernel gives up when it
    must."""
    for limit, used, caches in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        allowed = _number(folder / limit)
        if allowed is not None and allowed < _UNLIMITED:
            cached = sum(_statistic(folder / "memory.stat", cache) for cache in caches)
            in_use = (_number(folder / used) or 0) - cached
            return max(0, int(share * allowed) - in_use)
    return _UNLIMITED


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # it may be "max"


def _statistic(path: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", _text(path), re.MULTILINE)
    return 0 if found is None else int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such file
        return ""
