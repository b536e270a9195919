"""Rules of the house that a linter does not know: sizes, names, and what may shadow what."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("serving", "disagg", "autoconfig", "kernels", "deploy", "loadtest")
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MAX_MODULES = 28
MAX_MODULES_IN_ROOM = 16
ROOMS = (
    "disagg/plait_fabric/*",
    "disagg/plait_disagg/queue",
    "disagg/plait_disagg/messages",
    "disagg/plait_disagg/workers",
    "serving/plait_serving/images",
    "serving/plait_serving/ranking",
    "serving/plait_serving/deployments",
    "serving/plait_serving/http",
    "serving/plait_serving/http/**",
    "serving/plait/**",
    "loadtest/plait_bench/**",
)


def sources() -> list[Path]:
    """Every Python file of the product (tests are judged by eye)."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_files_hold_one_thing():
    """No file is longer than 500 lines: a longer one usually hides two things."""
    long = {str(path.relative_to(ROOT)): lines for path in sources() if (lines := _lines(path)) > LONGEST_FILE}
    assert long == {}


def test_functions_are_short():
    """No function is longer than 60 lines."""
    long = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert long == {}


def test_folders_hold_few_modules():
    """No folder has more than 28 modules, and none of those that were laid out as rooms more than 16."""
    rooms = {path for pattern in ROOMS for path in ROOT.glob(pattern) if path.is_dir()}
    full = {}
    for folder in {path.parent for path in sources()}:
        modules = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        name = str(folder.relative_to(ROOT))
        if modules > (MAX_MODULES_IN_ROOM if folder in rooms else MAX_MODULES):
            full[name] = modules
    assert full == {}


def test_unit_tests_lie_where_the_source_lies():
    """Every folder below tests/unit is `<package>/...`, and the package has that folder."""
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")} - {Path()}
    assert [str(folder) for folder in sorted(folders) if not any((ROOT / p / folder).is_dir() for p in PACKAGES)] == []
    assert folders


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


def test_test_functions_say_what_they_promise():
    """Every test has a docstring."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and ast.get_docstring(node) is None:
                silent.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert silent == []


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


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


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
