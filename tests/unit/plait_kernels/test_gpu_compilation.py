"""Every Triton kernel compiles for a GPU, without one: the interpreter lets through what the compiler refuses.

An argument that is 1 becomes a constant of the kernel, and a constant has no tensor's methods.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import TESTS

pytest.importorskip("triton", reason="needs triton: make setup-kernels")

_PROGRAM = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
compiled, capabilities = set(), (80, 90)

def run(self, *args, grid, warmup, **named):
    given = {**dict(zip(self.arg_names, args)), **named}
    signature, constants, divisible = {}, {}, {}
    for i, parameter in enumerate(self.params):
        value = given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, int) and value and value % 16 == 0 and not parameter.is_constexpr:
            divisible[(i,)] = [["tt.divisibility", 16]]
    key = self.__name__, str(constants), str(signature), str(divisible)
    if key not in compiled and capabilities:
        for capability in capabilities:
            compile(ASTSource(self, signature, constants, divisible), target=GPUTarget("cuda", capability, 32))
    compiled.add(key)

JITFunction.run = run
from plait_kernels.geglu import triton_impl as geglu
from plait_kernels.group_norm_silu import triton_impl as norm
from suites.operators import REAL_NORMS, geglu_input, norm_case

for shape, dtype in (((1, 2), torch.float32), ((4, 512), torch.bfloat16)):
    geglu.geglu(geglu_input(shape, dtype, "cpu"))
for shape in ((1, 1, 1, 1, 1), (2, 6, 1, 1, 3), (1, 320, 16, 16, 32)):
    for layout in ("contiguous", "channels_last"):
        norm.group_norm_silu(**norm_case(shape, torch.float16, "cpu", layout=layout, addend=True))
norm.group_norm_silu(**norm_case((1, 8, 1, 2, 8), torch.float32, "cpu", layout="channels_last"), silu=False)
capabilities = (90,)
for channels, side in ((320, 128), (1920, 64), (2560, 8)):  # Stable Diffusion XL's and 1.5's narrowest and widest
    x = torch.empty(2, channels, side, side, dtype=torch.float16, device="meta")
    x = x.contiguous(memory_format=torch.channels_last)
    norm.group_norm_silu(x, 32, x[0, :, 0, 0], x[0, :, 0, 1], 1e-5, addend=x[:, :, 0, 0])
geglu.geglu(torch.empty(8192, 2 * 5120, dtype=torch.float16, device="meta"))
print(*sorted({name for name, *_ in compiled}))

compiled.clear()
capabilities = ()  # each of the following is one more to compile at a server's start
for rows in (2, 4, 8, 32):
    for _, channels, height, width in REAL_NORMS:
        x = torch.empty(rows, channels, height, width, dtype=torch.float16, device="meta")
        x = x.contiguous(memory_format=torch.channels_last)
        weight, bias, addend = x[0, :, 0, 0], x[0, :, 0, 1], x[:, :, 0, 0]
        for added, silu in ((None, True), (addend, True), (None, False)):
            norm.group_norm_silu(x, 32, weight, bias, 1e-5, addend=added, silu=silu)
print(len(compiled), len({name for name, *_ in compiled}))
"""


def test_every_kernel_compiles(tmp_path: Path):
    """For compute capabilities 8.0 and 9.0 at the sizes where arguments become constants, for 9.0 at those of Stable
    Diffusion 1.5 and XL. What these ask for at all batch sizes is few forms: a first request waits for each."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, counted = done.stdout.splitlines()
    assert kernels.split() == ["_geglu", "channel_statistics", "normalise_channels"]
    forms, used = map(int, counted.split())
    assert used == 2
    assert forms <= 90
