"""How many cores a process may use, and what they compute with."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from plait_kernels.cores import has_bfloat16, instruction_set, quota_cores, usable_cores


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
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores(tmp_path) == usable


AVX512 = "avx2 fma avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "limit", "found"),
    [
        (f"flags : {AVX512} avx512_bf16 amx_bf16 amx_tile", "", "amx_bf16"),
        (f"flags : {AVX512} avx512_bf16", "", "avx512_bf16"),
        (f"flags : {AVX512} amx_bf16_not", "", "avx512"),
        ("flags : avx2 fma avx512f", "", "avx2"),  # Knights Landing's, which programs are not compiled to
        ("flags : fpu sse2 avx", "", "none"),
        ("Features : fp asimd bf16", "", "neon_bf16"),
        ("Features : fp asimd", "", "neon"),
        (f"flags : {AVX512} avx512_bf16", "AVX2", "avx2"),
        (f"flags : {AVX512} avx512_bf16", "avx512_core", "avx512"),
        (f"flags : {AVX512} avx512_bf16 amx_bf16", "AVX512_CORE_BF16", "avx512_bf16"),
        ("flags : avx2 fma", "AVX512_CORE_BF16", "avx2"),
        (f"flags : {AVX512} avx512_bf16", "SSE41", "none"),
        (f"flags : {AVX512} avx512_bf16", "ALL", "avx512_bf16"),
        ("Features : fp asimd bf16", "AVX2", "neon_bf16"),
    ],
)
def test_the_instruction_set_is_what_the_cpu_has_and_onednn_may_use(
    flags: str, limit: str, found: str, tmp_path: Path
) -> None:
    """By whole words; bfloat16 is there only with instructions that multiply in it."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\n{flags}\n")
    assert instruction_set(path, {"ONEDNN_MAX_CPU_ISA": limit}) == found
    assert has_bfloat16(path, {"ONEDNN_MAX_CPU_ISA": limit}) is found.endswith("bf16")


def test_the_limit_s_older_name_counts_too(tmp_path: Path) -> None:
    """oneDNN reads both, the newer one first."""
    path = tmp_path / "cpuinfo"
    path.write_text(f"flags : {AVX512} avx512_bf16\n")
    assert instruction_set(path, {"DNNL_MAX_CPU_ISA": "AVX2"}) == "avx2"
    assert instruction_set(path, {"DNNL_MAX_CPU_ISA": "AVX2", "ONEDNN_MAX_CPU_ISA": "ALL"}) == "avx512_bf16"


def test_a_system_that_does_not_say_has_no_bfloat16(tmp_path: Path) -> None:
    """The machine's type is told."""
    assert instruction_set(tmp_path / "none", {}) == platform.machine()
    assert not has_bfloat16(tmp_path / "none", {})
