"""The operators on a GPU: what tests/unit/plait_kernels holds the interpreted kernels to, and the sizes of real models.

Needs torch, triton, pytest, hypothesis and plait's kernels; beyond a checkout nothing is installed:
`PYTHONPATH=kernels:tests python -m pytest tests/gpu --noconftest -c /dev/null --rootdir tests/gpu -p no:cacheprovider`
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from plait_kernels.registry import load
from suites.operators import (
    DTYPES,
    GEGLU_SHAPES,
    NORM_SHAPES,
    ROW_SHAPES,
    check_geglu,
    check_norm,
    check_residuals,
    fuzz,
    geglu_input,
    geglu_inputs,
    norm_case,
    norm_cases,
    residual_case,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = "cuda"

# (N, C, H, W) of SDXL at 1024x1024 and SD 1.5 at 512x512, both guided: every width, and what up blocks concatenate.
REAL = [
    (2, 320, 128, 128), (2, 640, 64, 64), (2, 1280, 32, 32), (2, 960, 128, 128), (2, 1920, 64, 64), (2, 2560, 32, 32),
    (2, 320, 64, 64), (2, 640, 32, 32), (2, 1280, 16, 16), (2, 1280, 8, 8), (2, 2560, 8, 8), (3, 640, 144, 112),
]  # fmt: skip


def geglu(x: torch.Tensor) -> torch.Tensor:
    """The form that the registry gives this device."""
    return load("geglu", GPU, x.dtype, "triton")(x)


def norm(**case) -> torch.Tensor:
    """The form that the registry gives this device."""
    x = case["x"]
    width = x.shape[1] // case["groups"]
    return load("group_norm_silu", GPU, x.dtype, "triton", elements=x.numel(), group_channels=width)(**case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*GEGLU_SHAPES, (2, 4096, 5120), (2, 1024, 10240), (8, 1024, 2560)], ids=str)
def test_geglu_is_the_formula(shape, dtype):
    """One rounding from fp64."""
    for strided in (False, True):
        check_geglu(geglu, geglu_input(shape, dtype, GPU, strided=strided))


@given(geglu_inputs(GPU))
@fuzz
def test_geglu_on_any_input(x):
    """Whatever hypothesis thinks of."""
    check_geglu(geglu, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("shape", [*NORM_SHAPES, *((*shape, 32) for shape in REAL)], ids=str)
def test_group_norm_silu_is_the_formula(shape, layout, dtype):
    """One rounding from fp64, with and without a time embedding and SiLU."""
    for addend, silu in ((True, True), (False, True), (False, False)):
        check_norm(norm, norm_case(shape, dtype, GPU, layout=layout, addend=addend), silu=silu)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_values_far_from_zero_keep_their_variance(layout):
    """A mean of ten thousand standard deviations."""
    check_norm(norm, norm_case((2, 320, 64, 64, 32), torch.float32, GPU, layout=layout, offset=1e4))


@given(norm_cases(GPU))
@fuzz
def test_group_norm_silu_on_any_input(case):
    """Whatever hypothesis thinks of."""
    check_norm(norm, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*ROW_SHAPES, (2, 320, 128, 128)], ids=str)
@pytest.mark.parametrize("layouts", ["cc", "cl", "ll"])
def test_residual_add_is_the_formula(shape, layouts, dtype):
    """One rounding from fp64, for none to four residuals."""
    for count in range(5):
        form = load("residual_add", GPU, dtype, "triton", residuals=count)
        check_residuals(form, residual_case(shape, count, dtype, GPU, layouts=layouts))


def test_operators_can_be_captured_in_a_graph():
    """A CUDA graph replays them on new contents of the same memory: nothing waits for the host."""
    case = norm_case((2, 64, 16, 16, 32), torch.float16, GPU, layout="channels_last", addend=True)
    x = geglu_input((64, 256), torch.float16, GPU)
    norm(**case), geglu(x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z = norm(**case), geglu(x)
    case["x"].mul_(0.5).add_(1.0)
    x.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, norm(**case))
    assert torch.equal(z, geglu(x))
