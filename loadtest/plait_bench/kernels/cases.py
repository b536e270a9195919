"""The cases: an operator at one size, what plait computes it with, and what eager torch (diffusers) does.

Sizes are those of guided denoising, two rows: SDXL at 1024x1024, Stable Diffusion 1.5 at 512x512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from plait_kernels.registry import load
from plait_kernels.residual_add import ResidualAddOp

Arguments = tuple[Any, ...]
Form = Callable[..., object]

_SDXL_NORMS = [(320, 128), (960, 128), (640, 64), (1920, 64), (1280, 32), (2560, 32)]
_SD15_NORMS = [(320, 64), (640, 32), (1280, 16), (2560, 8)]
_SDXL_GEGLUS = [(4096, 2560), (1024, 5120)]  # (tokens, D)
_SD15_GEGLUS = [(4096, 1280), (1024, 2560), (256, 5120)]
_ROWS = 2
_GROUPS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorCase:
    """`moved` counts what an operator must read and write, in elements of the dtype, each once; `flops` the operations
    of one that is bound by computing, 0 of others.

    `make(device, dtype)` gives the arguments of one call. `plait`: None where plait has no form of its own. `others`
    make further forms, by system; they raise `SystemUnavailable`. `compiles`: whether torch.compile takes part.
    """

    name: str
    op: str
    moved: int
    make: Callable[[str, torch.dtype], Arguments]
    plait: Form | None
    eager: Form
    others: Mapping[str, Callable[[], Form]] = field(default_factory=dict)
    flops: float = 0.0
    compiles: bool = True


def cases(device: str) -> list[OperatorCase]:
    """Return all cases; on a CPU a size of each."""
    small = device == "cpu"
    found = [_geglu("sdxl", *size) for size in _SDXL_GEGLUS[:1] if small] or [
        *(_geglu("sdxl", *size) for size in _SDXL_GEGLUS),
        *(_geglu("sd15", *size) for size in _SD15_GEGLUS),
    ]
    norms = [("sdxl", size) for size in _SDXL_NORMS] + [("sd15", size) for size in _SD15_NORMS]
    found += [_norm(model, *size, last=True) for model, size in (norms[2:3] if small else norms)]
    found += [_norm(model, *size, last=False) for model, size in (norms[2:3] if small else norms[:6:2])]
    found += [_residuals("sdxl", *size) for size in ((640, 64), (320, 128))[: 1 if small else 2]]
    found += [_plain_norm(model, *size) for model, size in ([] if small else norms[2:5:2])]
    return found


def _geglu(model: str, tokens: int, width: int) -> OperatorCase:
    def make(device: str, dtype: torch.dtype) -> Arguments:
        return (torch.randn(_ROWS, tokens, 2 * width, device=device, dtype=dtype),)

    def plait(x: torch.Tensor) -> object:
        return load("geglu", x.device.type, x.dtype)(x)

    def eager(x: torch.Tensor) -> object:
        hidden, gate = x.chunk(2, dim=-1)
        return hidden * functional.gelu(gate)

    return OperatorCase(
        name=f"geglu-{model}-{tokens}x{width}",
        op="geglu",
        moved=3 * _ROWS * tokens * width,
        make=make,
        plait=plait,
        eager=eager,
    )


def _plait_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **more: Any) -> object:
    op = load(
        "group_norm_silu", x.device.type, x.dtype, elements=x.numel(), group_channels=x.shape[1] // _GROUPS
    )  # fmt: skip
    return op(x, _GROUPS, weight, bias, 1e-5, **more)


def _norm(model: str, channels: int, edge: int, *, last: bool) -> OperatorCase:
    """ResnetBlock2D's second half: time embedding, norm, SiLU."""

    def make(device: str, dtype: torch.dtype) -> Arguments:
        return (*_norm_arguments(channels, edge, device, dtype, last=last), _randn(_ROWS, channels)(device, dtype))

    def plait(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, time: torch.Tensor) -> object:
        return _plait_norm(x, weight, bias, addend=time)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, time: torch.Tensor) -> object:
        return functional.silu(functional.group_norm(x + time[:, :, None, None], _GROUPS, weight, bias, 1e-5))

    layout = "" if last else "-contiguous"
    return OperatorCase(
        name=f"group-norm-silu-{model}-{channels}x{edge}{layout}",
        op="group_norm_silu",
        moved=2 * _ROWS * channels * edge * edge,
        make=make,
        plait=plait,
        eager=eager,
    )


def _plain_norm(model: str, channels: int, edge: int) -> OperatorCase:
    """Transformer2DModel's norm: nothing before it or after it."""

    def make(device: str, dtype: torch.dtype) -> Arguments:
        return _norm_arguments(channels, edge, device, dtype, last=True)

    def plait(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        return _plait_norm(x, weight, bias, silu=False)

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> object:
        return functional.group_norm(x, _GROUPS, weight, bias, 1e-5)

    return OperatorCase(
        name=f"group-norm-{model}-{channels}x{edge}",
        op="group_norm_silu",
        moved=2 * _ROWS * channels * edge * edge,
        make=make,
        plait=plait,
        eager=eager,
    )


def _residuals(model: str, channels: int, edge: int) -> OperatorCase:
    """Three ControlNets on one skip."""

    def make(device: str, dtype: torch.dtype) -> Arguments:
        skip, *residuals = (
            _randn(_ROWS, channels, edge, edge)(device, dtype).to(memory_format=torch.channels_last) for _ in range(4)
        )
        return skip, residuals, torch.full((3, _ROWS), 0.01, device=device)

    def plait(skip: torch.Tensor, residuals: list[torch.Tensor], scales: torch.Tensor) -> object:
        op: ResidualAddOp = load("residual_add", skip.device.type, skip.dtype, residuals=len(residuals))
        op(skip, residuals, scales)
        return skip

    def eager(skip: torch.Tensor, residuals: list[torch.Tensor], scales: torch.Tensor) -> object:
        del scales  # diffusers multiplies by a Python number where a ControlNet ends
        scaled = [residual * 0.01 for residual in residuals]
        skip += scaled[0] + scaled[1] + scaled[2]
        return skip

    return OperatorCase(
        name=f"residual-add-{model}-{channels}x{edge}",
        op="residual_add",
        moved=5 * _ROWS * channels * edge * edge,
        make=make,
        plait=plait,
        eager=eager,
    )


def _norm_arguments(channels: int, edge: int, device: str, dtype: torch.dtype, *, last: bool) -> Arguments:
    x = torch.randn(_ROWS, channels, edge, edge, device=device, dtype=dtype)
    layout = torch.channels_last if last else torch.contiguous_format
    return (x.to(memory_format=layout), *(_randn(channels)(device, dtype) for _ in range(2)))


def _randn(*shape: int) -> Callable[[str, torch.dtype], torch.Tensor]:
    return lambda device, dtype: torch.randn(*shape, device=device, dtype=dtype)


def copied(moved: int) -> Callable[[str, torch.dtype], Arguments]:
    """Return what makes the argument of a copy that moves as many elements: half are read, half are written."""
    return lambda device, dtype: (_randn(math.ceil(moved / 2))(device, dtype),)


def multiplied(flops: float) -> Callable[[str, torch.dtype], Arguments]:
    """Return what makes the arguments of a product of square matrices of as many operations."""
    side = max(1, round((flops / 2) ** (1 / 3)))
    return lambda device, dtype: (_randn(side, side)(device, dtype), _randn(side, side)(device, dtype))


def calls(form: Form, sets: Sequence[Arguments]) -> list[Callable[[], object]]:
    """Bind the form to each set of arguments."""
    return [lambda arguments=arguments: form(*arguments) for arguments in sets]  # type: ignore[misc]
