"""OpenVINO beside a limit that is torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino", reason="needs openvino")

LIMITED = """
import os, sys, torch
from pathlib import Path
from plait_kernels.cores import instruction_set
from support.executors import by_hand, openvino_at, small_block, small_computation, small_inputs

block = small_block()
program = openvino_at(Path(sys.argv[1])).prepare("k", lambda: small_computation(block))
inputs = small_inputs(2, 5, 3)
for got, wanted in zip(program.run(inputs), by_hand(block, inputs), strict=True):
    assert float((got - wanted).abs().max()) < 1e-4
assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
assert torch.ops.mkldnn._is_mkldnn_bf16_supported() is (instruction_set() == "neon_bf16")
"""


def test_a_limit_of_onednn_is_torch_s_alone(tmp_path: Path) -> None:
    """Half of OpenVINO obeyed it, and models of this kind ended the process; torch and child processes still see it."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
