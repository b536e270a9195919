"""What every form of an operator promises, checked on any device: against fp64, on odd shapes, into poisoned memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from plait_kernels.geglu import reference as geglu_reference
from plait_kernels.group_norm_silu import reference as norm_reference
from plait_kernels.registry import select_impl

Form = Callable[..., torch.Tensor]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One rounding: half a unit in the last place, relative, and a little for the fp32 arithmetic before it.
# Triton's interpreter cuts bfloat16 off instead of rounding it: a whole unit.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROUNDING = {torch.float32: 2e-6, torch.float16: 5.5e-4, torch.bfloat16: 8e-3 if INTERPRETED else 4.3e-3}
EPS32 = 1.2e-7


def chosen_on_a_gpu(op: str, dtype: torch.dtype) -> str:
    """The name of the form that the registry gives a GPU on which everything runs."""
    return select_impl(op, "cuda", dtype, failure=lambda *_: None)[0].name


fuzz = settings(
    deadline=None, max_examples=80, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

# (N, C, H, W, groups) beyond what `norm_cases` draws: many groups, wide ones, groups that no block of channels divides.
NORM_SHAPES = [
    (1, 12, 5, 7, 12), (1, 70, 4, 4, 7), (2, 40, 6, 6, 4), (1, 4, 67, 31, 2), (1, 130, 2, 2, 1), (1, 160, 2, 3, 2),
]  # fmt: skip
# (N, C, H, W) of SDXL at 1024x1024 and SD 1.5 at 512x512, both guided: every width, and what up blocks concatenate.
REAL_NORMS = [
    (2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 32, 32), (2, 960, 128, 128), (2, 1920, 64, 64), (2, 2560, 32, 32),
    (2, 320, 64, 64), (2, 640, 32, 32), (2, 1280, 16, 16), (2, 1280, 8, 8), (2, 2560, 8, 8), (3, 640, 144, 112),
]  # fmt: skip


def seeded(seed: int) -> torch.Generator:
    """A CPU generator."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN inside: what a form leaves out shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=deterministic)


def assert_close(y: torch.Tensor, truth: torch.Tensor, slack: float = 0.0) -> None:
    """`y` is the fp64 truth rounded once to its dtype, but for `slack` (absolute, what fp32 loses before)."""
    assert y.shape == truth.shape
    assert bool(torch.isfinite(y).all()) or not bool(torch.isfinite(truth).all())
    if y.numel():
        tiny = torch.finfo(y.dtype).smallest_normal if y.dtype is torch.float16 else 0.0
        error = (y.double() - truth.to(y.device)).abs() - ROUNDING[y.dtype] * truth.to(y.device).abs()
        assert float(error.max()) <= slack + tiny + 1e-30, float(error.max())


# ---- GEGLU ----------------------------------------------------------------------------------------------------------


def check_geglu(form: Form, x: torch.Tensor) -> None:
    """The form is the formula on `x`, whose memory it leaves alone."""
    kept = x.clone()
    with poisoned():
        y = form(x)
    assert y.dtype is x.dtype
    assert y.is_contiguous()
    assert torch.equal(x, kept)
    # The tail of gelu is a difference of numbers near one: absolute, not relative, in fp32.
    largest = float(x.abs().max()) if x.numel() else 0.0
    assert_close(y, geglu_reference.geglu(x.double()), slack=2 * EPS32 * largest * largest)


def geglu_input(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random input."""
    return (torch.randn(list(shape), generator=seeded(0)) * 2).to(dtype).to(device)


@st.composite
def geglu_inputs(draw: Any, device: str) -> torch.Tensor:
    """Any shape of up to three dimensions, any dtype, with and without gaps between rows."""
    lead, gap = draw(st.lists(st.integers(0, 7), max_size=2)), draw(st.sampled_from([0, 3]))
    width = 2 * draw(st.integers(0, 150) | st.sampled_from([256, 257]))
    x = torch.randn((*lead, width + gap), generator=seeded(draw(st.integers(0, 99))))
    x *= draw(st.sampled_from([0.0, 2e-3, 2.0, 60.0]))
    return x.to(draw(st.sampled_from(DTYPES))).to(device)[..., gap:]


# ---- GroupNorm + SiLU -----------------------------------------------------------------------------------------------


def norm_case(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    *,
    layout: str = "contiguous",
    addend: bool = False,
    offset: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of the operator. `layout`: contiguous, channels_last, or strided (neither)."""
    n, c, h, w, groups = shape
    generator = seeded(seed)
    x = torch.randn(n, c, h, w + (layout == "strided"), generator=generator) + offset
    x = x.to(dtype).to(device)
    if layout == "strided":
        x = x[..., 1:]
    elif layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(c, generator=generator).to(dtype).to(device) for _ in range(2))
    added = torch.randn(n, c, generator=generator).to(dtype).to(device) if addend else None
    return {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": 1e-5, "addend": added}


def check_norm(form: Form, case: dict[str, Any], *, silu: bool = True) -> None:
    """The form is the formula, keeps channels-last memory and leaves its inputs alone."""
    x = case["x"]
    kept = x.clone()
    with poisoned():
        y = form(**case, silu=silu)
    assert y.dtype is x.dtype
    assert torch.equal(x, kept)
    if x.is_contiguous(memory_format=torch.channels_last) and x.numel():
        assert y.is_contiguous(memory_format=torch.channels_last)
    else:
        assert y.is_contiguous()
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in case.items()}
    truth = norm_reference.group_norm_silu(**wide, silu=silu)
    assert_close(y, truth, slack=_norm_slack(wide, case["groups"]) if x.numel() else 0.0)


def _norm_slack(case: dict[str, Any], groups: int) -> float:
    """What fp32 may lose: units in the last place of the largest value, as many standard deviations as it is."""
    v = case["x"] if case["addend"] is None else case["x"] + case["addend"][:, :, None, None]
    grouped = v.reshape(v.shape[0], groups, -1)
    spread = (grouped.var(dim=2, correction=0) + case["eps"]).sqrt()
    largest = grouped.abs().amax(dim=2) + case["x"].abs().max()
    return float((largest / spread).max() * case["weight"].abs().max()) * 6 * EPS32 + 4 * EPS32


@st.composite
def norm_cases(draw: Any, device: str) -> dict[str, Any]:
    """Any small shape, dtype and layout; values up to a thousand standard deviations from zero."""
    groups = draw(st.integers(1, 5))
    shape = (
        draw(st.integers(0, 2)),
        groups * draw(st.integers(1, 5)),
        draw(st.integers(0, 9)),
        draw(st.integers(1, 9)),
        groups,
    )
    return norm_case(
        shape,
        draw(st.sampled_from(DTYPES)),
        device,
        layout=draw(st.sampled_from(["contiguous", "channels_last", "strided"])),
        addend=draw(st.booleans()),
        offset=draw(st.sampled_from([0.0, 3.0, 1000.0])),
        seed=draw(st.integers(0, 99)),
    )
