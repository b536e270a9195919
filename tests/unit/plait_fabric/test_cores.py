"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait_fabric import cores
from plait_fabric.cores import has_bfloat16, quota_cores, usable_cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "junk"}, None),
        ({}, None),
    ],
)
def test_a_container_s_quota_is_read_in_both_versions(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    """In cores; without a limit there is none."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota_cores(tmp_path) == quota


@pytest.mark.parametrize(("quota", "usable"), [("max", 64), ("250000", 3), ("10000", 1), ("9900000", 64)])
def test_threads_fit_the_quota(quota: str, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of two and a half cores on a host of 64 has three threads, not 64."""
    (tmp_path / "cpu.max").write_text(f"{quota} 100000")
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores() == usable


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx512f amx_bf16_not\n", False),
        (None, False),
    ],
)
def test_bfloat16_is_read_from_the_cpu_s_flags(text: str | None, has: bool, tmp_path: Path) -> None:
    """A whole word; no file, no instructions."""
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert has_bfloat16(path) is has
