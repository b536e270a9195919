"""Selects the implementation of an operator: frozen records plus one pure function.

Each operator has a `reference` that defines it and runs everywhere, and faster counterparts that are tested against
it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

_log = logging.getLogger(__name__)

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBound:
    """What an implementation takes of one size of a problem, as "elements": from `low` to `high`."""

    size: str
    low: int = 0
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplInfo:
    """One implementation of `op`. `entry` is `module:function`, imported only when it is chosen.

    `dtypes` are those of the tensor that the operator writes; `devices` None: any. `bounds` are of sizes, which the
    caller of `load` must then give. What is `compiled` on the machine has a function `trial(device, dtype)` beside its
    entry, which runs it once: it needs a package, a compiler and headers, and a GPU that the compiler knows.
    """

    op: str
    name: str
    entry: str
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = None
    bounds: tuple[SizeBound, ...] = ()
    compiled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chosen implementation; `passed_over` lists, best first, the better ones that did not fit, and why."""

    impl: ImplInfo
    passed_over: tuple[str, ...] = ()


class KernelError(LookupError):
    """No implementation fits, or the requested one does not."""


def _reference(entry: str, dtypes: frozenset[torch.dtype] = _FLOATS | {torch.float64}) -> ImplInfo:
    return ImplInfo(op=entry.split(".")[1], name="reference", entry=entry, dtypes=dtypes)


def _triton(entry: str, *bounds: SizeBound) -> ImplInfo:
    return ImplInfo(
        op=entry.split(".")[1],
        name="triton",
        entry=entry,
        devices=frozenset({"cuda"}),
        dtypes=_FLOATS,
        bounds=bounds,
        compiled=True,
    )


IMPLS: tuple[ImplInfo, ...] = (
    ImplInfo(op="lora_merge", name="concat", entry="plait_kernels.lora_merge.concat:merge_", dtypes=_FLOATS),
    _reference("plait_kernels.lora_merge.reference:merge_"),
    _triton("plait_kernels.geglu.triton_impl:geglu"),
    _reference("plait_kernels.geglu.reference:geglu"),
    # Offsets are int32, with room for a last tile. A tile holds whole groups; a table of its groups x lanes stays in
    # registers.
    _triton(
        "plait_kernels.group_norm_silu.triton_impl:group_norm_silu",
        SizeBound(size="elements", high=2**30),
        SizeBound(size="group_channels", low=1, high=1024),
    ),
    _reference("plait_kernels.group_norm_silu.reference:group_norm_silu"),
    ImplInfo(
        op="int8_lookup",
        name="quantized",
        entry="plait_kernels.int8_lookup.cpu_impl:int8_lookup",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
    ),
    _reference("plait_kernels.int8_lookup.reference:int8_lookup", frozenset({torch.float32})),
)
"""Of each operator the best implementation first."""


@lru_cache(maxsize=256)
def trial_failure(impl: ImplInfo, device: str, dtype: torch.dtype) -> str | None:
    """Run what is `compiled` once on small tensors; return why it does not run here, or None. A process asks once."""
    if not impl.compiled:
        return None
    try:
        importlib.import_module(impl.entry.partition(":")[0]).trial(device, dtype)
    except Exception as error:  # of an import, a compiler or a driver: whatever it is, the reference runs
        text = str(error).strip().splitlines()
        return f"does not run here ({type(error).__name__}{f': {text[0]}' if text else ''})"
    return None


def select_impl(
    op: str,
    device: str,
    dtype: torch.dtype,
    explicit: str | None = None,
    *,
    sizes: Mapping[str, int] = MappingProxyType({}),
    impls: Sequence[ImplInfo] = IMPLS,
    failure: Callable[[ImplInfo, str, torch.dtype], str | None] = trial_failure,
) -> Selection:
    """Return the implementation of `op` for a device type ("cpu", "cuda", ...), a dtype and a problem's sizes.

    `explicit` names one: raises `KernelError` with the reason if it does not fit. Without it the first that fits is
    chosen. Pure but for `failure`, which looks at the machine.
    """
    known = [impl for impl in impls if impl.op == op]
    if explicit is not None:
        known = [impl for impl in known if impl.name == explicit]
        if not known:
            raise KernelError(f"{op} has no implementation named {explicit!r}")
    passed_over: list[str] = []
    for impl in known:
        reason = _misfit(impl, device, dtype, sizes) or failure(impl, device, dtype)
        if reason is None:
            return Selection(impl=impl, passed_over=tuple(passed_over))
        passed_over.append(f"{impl.name}: {reason}")
    why = "; ".join(passed_over) or "the operator is unknown"
    raise KernelError(f"no implementation of {op} for {dtype} on {device} ({why})")


def _misfit(impl: ImplInfo, device: str, dtype: torch.dtype, sizes: Mapping[str, int]) -> str | None:
    if impl.devices is not None and device not in impl.devices:
        return f"does not run on {device}"
    if dtype not in impl.dtypes:
        return f"does not write {dtype}"
    for bound in impl.bounds:
        if bound.size not in sizes:
            return f"must be told {bound.size}"
        if sizes[bound.size] < bound.low:
            return f"takes {bound.size} from {bound.low}"
        if sizes[bound.size] > bound.high:
            return f"takes {bound.size} up to {bound.high}"
    return None


@lru_cache(maxsize=4096)
def load(op: str, device: str, dtype: torch.dtype, explicit: str | None = None, **sizes: int) -> Callable[..., Any]:
    """Select and import an implementation; a repeated question costs a look-up. Raises `KernelError`.

    `sizes` are those that the operator's `bounds` speak of. Every outcome is logged once: which was chosen, and which
    better ones were passed over and why.
    """
    selection = select_impl(op, device, dtype, explicit, sizes=sizes)
    _announce(selection, device, dtype)
    module, _, function = selection.impl.entry.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@lru_cache(maxsize=4096)
def _announce(selection: Selection, device: str, dtype: torch.dtype) -> None:
    """Log a selection; the cache makes it once, however many sizes lead to it."""
    level = logging.WARNING if selection.passed_over else logging.INFO
    passed_over = f" (not {'; '.join(selection.passed_over)})" if selection.passed_over else ""
    _log.log(level, "%s on %s/%s runs as %s%s", selection.impl.op, device, dtype, selection.impl.name, passed_over)
