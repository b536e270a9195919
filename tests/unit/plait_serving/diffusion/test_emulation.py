"""What is said where bfloat16 was asked for and the CPU does not compute it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from plait_serving.diffusion import emulation
from plait_serving.diffusion.emulation import warn_of_emulation

SETTLE = """
from plait.precision import settled
from plait_serving.images.config import ImagesSection
for dtype in ("float32", "auto", "bfloat16", "bfloat16"):
    print(settled(ImagesSection(device="cpu", dtype=dtype)).dtype)
"""
PRICE = re.compile(
    r"this CPU \((\w+)\) has no instructions: a convolution takes ([\d.e+]+) ms here, in float32 ([\d.e-]+)"
)


def test_the_price_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However many models there are; nothing where the CPU computes it."""
    warn_of_emulation.cache_clear()
    monkeypatch.setattr(emulation, "has_bfloat16", lambda: True)
    warn_of_emulation()
    assert not caplog.records
    warn_of_emulation.cache_clear()
    monkeypatch.setattr(emulation, "has_bfloat16", lambda: False)
    warn_of_emulation()
    warn_of_emulation()
    (record,) = caplog.records
    assert PRICE.search(record.getMessage())
    warn_of_emulation.cache_clear()


def test_the_command_says_it_before_it_starts() -> None:
    """On its stderr, with what was measured; a dtype that was left out is never bfloat16 there."""
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    said = subprocess.run([sys.executable, "-c", SETTLE], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["float32", "float32", "bfloat16", "bfloat16"]
    (line,) = said.stderr.splitlines()
    found = PRICE.search(line)
    assert found
    assert float(found[2]) > float(found[3])  # by a factor of about 60
