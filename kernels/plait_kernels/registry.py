"""Selects the implementation of an operator: frozen records plus one pure function.

Each operator has a `reference` that defines it and runs everywhere, and faster counterparts that are tested against
it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_log = logging.getLogger(__name__)

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplInfo:
    """One implementation of `op`. `entry` is `module:function`, imported only when it is chosen.

    `dtypes` are those of the tensor that the operator writes. `needs` names modules that must be importable.
    Among the implementations that fit, the highest `rank` wins.
    """

    op: str
    name: str
    entry: str
    rank: int
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chosen implementation; `passed_over` lists, best first, the better ones that did not fit, and why."""

    impl: ImplInfo
    passed_over: tuple[str, ...] = ()


class KernelError(LookupError):
    """No implementation fits, or the requested one does not."""


IMPLS: tuple[ImplInfo, ...] = (
    ImplInfo(
        op="lora_merge",
        name="reference",
        entry="plait_kernels.lora_merge.reference:merge_",
        rank=0,
        devices=frozenset({"cpu", "cuda"}),
        dtypes=_FLOATS | {torch.float64},
    ),
    ImplInfo(
        op="lora_merge",
        name="concat",
        entry="plait_kernels.lora_merge.concat:merge_",
        rank=10,
        devices=frozenset({"cpu", "cuda"}),
        dtypes=_FLOATS,
    ),
)


def is_importable(module: str) -> bool:
    """Return whether a top-level module is installed, without importing it."""
    return importlib.util.find_spec(module) is not None


def select_impl(
    op: str,
    device: str,
    dtype: torch.dtype,
    explicit: str | None = None,
    *,
    impls: Sequence[ImplInfo] = IMPLS,
    importable: Callable[[str], bool] = is_importable,
) -> Selection:
    """Return the implementation of `op` for a device type ("cpu", "cuda") and dtype. Pure.

    `explicit` names one: raises `KernelError` with the reason if it does not fit. Without it the best that fits is
    chosen.
    """
    known = sorted((impl for impl in impls if impl.op == op), key=lambda impl: -impl.rank)
    if explicit is not None:
        known = [impl for impl in known if impl.name == explicit]
        if not known:
            raise KernelError(f"{op} has no implementation named {explicit!r}")
    passed_over: list[str] = []
    for impl in known:
        reason = _misfit(impl, device, dtype, importable)
        if reason is None:
            return Selection(impl=impl, passed_over=tuple(passed_over))
        passed_over.append(f"{impl.name}: {reason}")
    why = "; ".join(passed_over) or "the operator is unknown"
    raise KernelError(f"no implementation of {op} for {dtype} on {device} ({why})")


def _misfit(impl: ImplInfo, device: str, dtype: torch.dtype, importable: Callable[[str], bool]) -> str | None:
    if device not in impl.devices:
        return f"does not run on {device}"
    if dtype not in impl.dtypes:
        return f"does not write {dtype}"
    missing = [module for module in impl.needs if not importable(module)]
    return f"needs {', '.join(missing)}" if missing else None


@cache
def load(op: str, device: str, dtype: torch.dtype, explicit: str | None = None) -> Callable[..., Any]:
    """Select and import an implementation; log once which was chosen, and which better ones were passed over and
    why."""
    selection = select_impl(op, device, dtype, explicit)
    level = logging.WARNING if selection.passed_over else logging.INFO
    passed_over = f" (not {'; '.join(selection.passed_over)})" if selection.passed_over else ""
    _log.log(level, "%s on %s/%s runs as %s%s", op, device, dtype, selection.impl.name, passed_over)
    module, _, function = selection.impl.entry.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded
