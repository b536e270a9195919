"""The operators at the sizes of real models: against their definitions, and as `plait bench kernels` measures them."""

from __future__ import annotations

from itertools import product

import torch

from plait_bench import runner
from plait_bench.errors import Disagreement
from plait_bench.gpu.rows import GpuRun
from plait_bench.kernels import COMPILED, benchmark
from plait_bench.runner import RunPlan
from plait_kernels.registry import load

_ROUNDS = 5
_ROUNDING = {torch.float32: 4e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
"""One rounding, relative, and a little for float32's arithmetic before it."""
_SHAPES = ((2, 320, 128, 128), (2, 1920, 64, 64), (2, 2560, 8, 8), (3, 640, 144, 112))
"""(N, C, H, W) of Stable Diffusion XL and 1.5: the widest, the narrowest, and one of no power of two."""


def operators(run: GpuRun) -> None:
    """Compare and time each that a GPU has."""
    _promises(run)
    for workload in benchmark(only=("geglu-sdxl-4096x2560",) if run.tiny else ()):
        if run.left_s <= 0:
            return
        names = tuple(name for name in workload.systems if not (run.tiny and name == COMPILED))
        try:
            (result,) = runner.run((workload,), RunPlan(rounds=_ROUNDS, systems=names), say=lambda _: None)
        except Disagreement as error:
            run.failed("operators", str(error))
        else:
            for row in result.rows:
                run.put("operators", row)


def _promises(run: GpuRun) -> None:
    """Compare each form with its definition in float64: a rounding apart."""
    for dtype, (rows, channels, *sides) in product(_ROUNDING, _SHAPES[:1] if run.tiny else _SHAPES):
        x = torch.randn(rows, channels, *sides, device=run.device).to(dtype)
        weight, bias = torch.randn(2, channels, device=run.device).to(dtype)
        time = torch.randn(rows, channels, device=run.device).to(dtype)
        wide = [it.double() for it in (x, weight, bias, time)]
        norm, exact = (load("group_norm_silu", run.device.type, it) for it in (dtype, torch.float64))
        for layout in (torch.contiguous_format, torch.channels_last):
            made = norm(x.contiguous(memory_format=layout), 32, weight, bias, 1e-5, addend=time)
            wanted = exact(wide[0], 32, wide[1], wide[2], 1e-5, addend=wide[3])
            _close(run, f"group_norm_silu {tuple(x.shape)} {layout}", made, wanted)
        gated, wide_gated = (load("geglu", run.device.type, it) for it in (dtype, torch.float64))
        _close(run, f"geglu {tuple(x.shape)}", gated(x.flatten(2)), wide_gated(wide[0].flatten(2)))


def _close(run: GpuRun, case: str, made: torch.Tensor, exact: torch.Tensor) -> None:
    bound = _ROUNDING[made.dtype] * exact.abs() + 1e-6 * exact.abs().max()
    worst = float(((made.double() - exact).abs() / bound).max())
    run.row("operators", f"{case} {made.dtype}", worst, metric="error", unit="roundings")
    if not worst <= 1:
        run.failed("operators", f"{case} {made.dtype}: {worst:.3g} roundings from its definition")
