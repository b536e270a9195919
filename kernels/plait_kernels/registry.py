"""Selects the implementation of an operator: frozen records plus one pure function.

Each operator has a `reference` that defines it and runs everywhere, and faster counterparts that are tested against
it.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

_log = logging.getLogger(__name__)

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplInfo:
    """One implementation of `op`. `entry` is `module:function`, imported only when it is chosen.

    `dtypes` are those of the tensor that the operator writes; `devices` None: any. What is `compiled` on the machine
    has a function `trial(device, dtype)` beside its entry, which runs it once: it needs a package, a compiler and
    headers, and a GPU that the compiler knows.
    """

    op: str
    name: str
    entry: str
    dtypes: frozenset[torch.dtype]
    devices: frozenset[str] | None = None
    compiled: bool = False


class KernelError(LookupError):
    """No implementation fits, or the requested one does not."""


def _reference(entry: str, dtypes: frozenset[torch.dtype] = _FLOATS | {torch.float64}) -> ImplInfo:
    return ImplInfo(op=entry.split(".")[1], name="reference", entry=entry, dtypes=dtypes)


def _triton(entry: str) -> ImplInfo:
    devices = frozenset({"cuda"})
    return ImplInfo(op=entry.split(".")[1], name="triton", entry=entry, devices=devices, dtypes=_FLOATS, compiled=True)


IMPLS: tuple[ImplInfo, ...] = (
    ImplInfo(op="lora_merge", name="concat", entry="plait_kernels.lora_merge.concat:merge_", dtypes=_FLOATS),
    _reference("plait_kernels.lora_merge.reference:merge_"),
    _triton("plait_kernels.geglu.triton_impl:geglu"),
    _reference("plait_kernels.geglu.reference:geglu"),
    _triton("plait_kernels.group_norm_silu.triton_impl:group_norm_silu"),
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
    impls: Sequence[ImplInfo] = IMPLS,
    failure: Callable[[ImplInfo, str, torch.dtype], str | None] = trial_failure,
) -> tuple[ImplInfo, tuple[str, ...]]:
    """Return the best implementation of `op` for a device type ("cpu", "cuda", ...) and a dtype, and, best first, the
    better ones that did not fit, each with the reason.

    `explicit` names the only one that will do. Raises `KernelError`, with the reasons, if none fits. Pure but for
    `failure`, which looks at the machine.
    """
    passed_over: list[str] = []
    for impl in impls:
        if impl.op == op and explicit in (None, impl.name):
            reason = _misfit(impl, device, dtype) or failure(impl, device, dtype)
            if reason is None:
                return impl, tuple(passed_over)
            passed_over.append(f"{impl.name}: {reason}")
    why = "; ".join(passed_over) or f"{explicit or 'the operator'} is unknown"
    raise KernelError(f"no implementation of {op} for {dtype} on {device} ({why})")


def _misfit(impl: ImplInfo, device: str, dtype: torch.dtype) -> str | None:
    if impl.devices is not None and device not in impl.devices:
        return f"does not run on {device}"
    if dtype not in impl.dtypes:
        return f"does not write {dtype}"
    return None


@lru_cache(maxsize=256)
def load(op: str, device: str, dtype: torch.dtype, explicit: str | None = None) -> Callable[..., Any]:
    """Select and import an implementation; a repeated question costs a look-up. Raises `KernelError`.

    Every outcome is logged once: which was chosen, and which better ones were passed over and why.
    """
    impl, others = select_impl(op, device, dtype, explicit)
    passed_over = f" (not {'; '.join(others)})" if others else ""
    level = logging.WARNING if others else logging.INFO
    _log.log(level, "%s on %s/%s runs as %s%s", op, device, dtype, impl.name, passed_over)
    loaded: Callable[..., Any] = pkgutil.resolve_name(impl.entry)
    return loaded
