"""OpenVINO beside a limit that is torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="needs openvino")

LIMITED = """
import os, torch
from plait_kernels.cores import instruction_set
from plait_kernels.executors.conversion import convert
from plait_kernels.executors.openvino_compiled import CompiledModel, compile_model
from support.executors import by_hand, small_block, small_computation, small_inputs

block = small_block()
model, layers = convert(small_computation(block))
compiled = compile_model(model, {"INFERENCE_PRECISION_HINT": "f32"})
inputs = small_inputs(2, 5, 3)
for got, wanted in zip(CompiledModel(compiled, layers).infer(inputs, None), by_hand(block, inputs), strict=True):
    assert float((got - wanted).abs().max()) < 1e-4
assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
assert torch.ops.mkldnn._is_mkldnn_bf16_supported() is (instruction_set() == "neon_bf16")
"""


def test_a_limit_of_onednn_is_torch_s_alone() -> None:
    """Half of OpenVINO obeyed it, and models of this kind ended the process; torch and child processes still see it."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", LIMITED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
