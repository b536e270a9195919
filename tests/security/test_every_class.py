"""Every published hole of the servers beside ours that this one could have has a test that is named after it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HOLES = (
    "CVE-2023-48022", "CVE-2023-48023", "CVE-2023-6019", "CVE-2025-62593", "CVE-2026-27482", "CVE-2026-111064",
    "CVE-2026-111066", "CVE-2026-44513", "GHSA-4prv-5hj7-c2xr", "CVE-2026-4372", "CVE-2026-5241", "CVE-2026-1839",
    "CVE-2025-32434", "CVE-2026-3059", "CVE-2026-3060", "CVE-2026-3989", "CVE-2026-7301", "CVE-2026-7302",
    "CVE-2026-7304", "CVE-2026-109229", "CVE-2026-24779", "CVE-2026-25960", "CVE-2026-100650", "CVE-2026-130686",
    "CVE-2026-116176", "CVE-2026-54233", "CVE-2024-10099", "CVE-2026-56671", "VA-26-238-01", "CVE-2025-67303",
    "CVE-2026-22777", "CVE-2026-123790", "CVE-2023-43654", "CVE-2024-35198", "CVE-2026-28416", "CVE-2026-28414",
    "CVE-2025-62727", "CVE-2024-47874", "CVE-2024-24762", "CVE-2024-53981",
)  # fmt: skip
"""Of Ray, diffusers, transformers, torch, SGLang, vLLM, ComfyUI and its plugins, TorchServe, Gradio, Starlette and
python-multipart."""

WITHOUT_NUMBER = ("a1111", "shadow_mq")
"""Classes that are known by a name: open by default with extensions as code; pickle copied from socket to socket."""


def names() -> set[str]:
    """The names of the tests of this folder, and of the cases that are named after a hole."""
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"(cve|ghsa)_[a-z0-9_]+", str(node.value)):
                found.add(str(node.value))
    return found


def test_every_hole_has_a_test_of_its_name() -> None:
    """A hole without one is one that somebody may open here, too."""
    text = " ".join(names())
    spelled = {hole: hole.lower().replace("-", "_") for hole in HOLES}
    assert [hole for hole, name in spelled.items() if not re.search(rf"{name}(?!\d)", text)] == []
    assert [name for name in WITHOUT_NUMBER if f"test_{name}_" not in text] == []
