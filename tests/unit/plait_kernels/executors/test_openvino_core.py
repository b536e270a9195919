"""How OpenVINO is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cluster import TESTS

pytest.importorskip("openvino", reason="needs openvino")

LIMITED = """
import os, sys, threading, torch
from pathlib import Path
os.fork = lambda: print("forked")
from plait_kernels.executors.openvino_core import core
core()
assert (threading.active_count(), sys.modules["openvino_telemetry"]) == (1, None)
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


def test_openvino_reports_nothing_and_a_limit_of_onednn_is_torch_s_alone(tmp_path: Path) -> None:
    """Its import would fork this process from another thread to send a message. Half of it obeyed the limit, and models
    of this kind ended the process; torch and child processes still see it."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "CI": "", "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
