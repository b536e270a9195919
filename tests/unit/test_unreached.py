"""The check for code that nothing reaches but tests, on a small made-up program."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pyproject.toml": '[project]\nscripts.plait = "plait.main:main"\n',
    "src/plait/__init__.py": "",
    "src/plait/main.py": """
from importlib import import_module
from plait.shapes import Circle
def main():
    import_module("plait.lazy:start")
    return Circle().area()
if __name__ == "__main__":
    main()
""",
    "src/plait/lazy.py": "",
    "src/plait/shapes/__init__.py": """
from plait.shapes.circle import Circle
from plait.shapes.square import Square
__all__ = ["Circle", "Square"]
""",
    "src/plait/shapes/circle.py": """
class Circle:
    def area(self): return 3
    def edge(self): return 6
""",
    "src/plait/shapes/square.py": "class Square: pass\n",
}


@pytest.fixture
def check(tmp_path):
    """The check, and a program whose `Square` is offered but never used."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    spec = importlib.util.spec_from_file_location("unreached", ROOT / ".ci" / "unreached.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_that_are_only_offered_are_unused(check, tmp_path):
    """A name in `__all__` is no use of it; a method that nobody calls is found too."""
    found = set(check.unused_names(tmp_path, ["src"]))
    assert found == {"src/plait/shapes/circle.py:edge", "src/plait/shapes/square.py:Square"}


def test_modules_that_no_program_imports_are_found(check, tmp_path):
    """A package that offers a module on does not reach it; a string that names a module does."""
    assert list(check.unreached_modules(tmp_path, ["src"])) == ["src/plait/shapes/square.py"]
