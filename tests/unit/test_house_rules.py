"""Rules of the house that a linter does not know: what may not be imported, tracked or shadowed."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("serving", "disagg", "autoconfig", "kernels", "deploy", "loadtest")


def sources() -> list[Path]:
    """Every Python file of the product."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_folder_of_ours_shadows_a_library():
    """`kernels` is probed by transformers and diffusers: our folder must not answer to that name."""
    spec = importlib.util.find_spec("kernels")
    assert spec is None or spec.origin is None or not spec.origin.startswith(str(ROOT))
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_no_pickle_and_no_shell():
    """Nothing of ours loads pickles or starts a shell."""
    forbidden = re.compile(r"^\s*(import pickle|from pickle)|torch\.load\(|shell=True", re.MULTILINE)
    allowed = {"serving/starter_training"}  # its checkpoints are its own, and it uses weights_only
    found = [
        str(path.relative_to(ROOT))
        for path in sources()
        if forbidden.search(path.read_text()) and not any(str(path.relative_to(ROOT)).startswith(a) for a in allowed)
    ]
    assert found == []


def test_nothing_large_is_tracked_by_accident():
    """Only the starter weights may be larger than 1 MB."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return  # an unpacked archive without git: nothing to check
    large = [
        name
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 1 << 20 and "/starter/weights/" not in name
    ]
    assert large == []


def test_no_two_files_import_each_other():
    """The imports of the product, deferred ones too, have no circle of files."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__"): path for path in sources()
    }
    graph = networkx.DiGraph()
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [
                    module if (module := f"{node.module}.{alias.name}") in modules else node.module
                    for alias in node.names
                ]
            else:
                continue
            graph.add_edges_from((name, other) for other in named if other in modules and other != name)
    assert graph.number_of_edges() > 1_000
    assert [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []
