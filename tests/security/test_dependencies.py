"""Versions of libraries that had the holes: what the package asks for, what is installed, and what is left out."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from plait.doctor import machine
from plait.doctor.findings import CheckStatus

ROOT = Path(__file__).resolve().parents[2]

FLOORS = {
    "cve_2026_27482_ray_delete_endpoints": ("ray", "2.60"),
    "cve_2025_62593_ray_dns_rebinding": ("ray", "2.52"),
    "cve_2026_111064_and_cve_2026_111066_aiohttp_in_ray": ("ray", "2.60"),
    "cve_2026_44513_diffusers_remote_code": ("diffusers", "0.38"),
    "ghsa_4prv_5hj7_c2xr_diffusers": ("diffusers", "0.42.1"),
    "cve_2026_4372_transformers_configuration": ("transformers", "5.3"),
    "cve_2026_5241_and_cve_2026_1839_transformers": ("transformers", "5.3"),
    "cve_2025_32434_torch_load": ("torch", "2.6"),
    "cve_2025_62727_starlette_ranges": ("starlette", "0.49.1"),
    "cve_2024_47874_starlette_forms": ("starlette", "1.0.1"),
    "cve_2024_24762_and_cve_2024_53981_forms": ("python-multipart", "0.0.18"),
    "cve_2026_109229_pillow_limits": ("pillow", "13"),
}
"""What closes each hole, by the hole's name."""


def requirements() -> dict[str, Requirement]:
    """What pyproject.toml asks for, by name; extras of development are left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {made.name: made for made in map(Requirement, project["dependencies"])}


@pytest.mark.parametrize("hole", list(FLOORS))
def test_version_floors(hole: str) -> None:
    """No version below the one that closed the hole may be installed, and none is."""
    name, floor = FLOORS[hole]
    asked = requirements()[name].specifier
    lowest = [Version(each.version) for each in asked if each.operator == ">="]
    assert lowest
    assert max(lowest) >= Version(floor)
    assert Version(importlib.metadata.version(name)) >= Version(floor)
    pinned = re.search(rf"^{name}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert Version(pinned[1]) >= Version(floor)


def test_cve_2026_27482_the_doctor_compares_what_runs_with_the_floors() -> None:
    """`plait doctor` tells who has an older one."""
    (found,) = machine.check_packages()
    assert found.verdict is CheckStatus.OK


@pytest.mark.parametrize("name", ["gradio", "pyzmq", "torchserve", "cloudpickle", "xformers"])
def test_cve_2026_28416_and_cve_2026_28414_what_is_not_needed_is_not_asked_for(name: str) -> None:
    """Gradio's SSRF and others' holes cannot be here; what Ray brings for itself opens no socket of ours."""
    assert name not in requirements()
