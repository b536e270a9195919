"""Find code that nothing reaches but tests: names that no source uses, and modules that no program imports.

Vulture reads the sources only, so what tests alone use shows up. A name in `__all__` is an offer, not a use. What may
stay is in `unreached.toml`, with the reason; an entry that no longer fits anything is reported too.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from vulture import core

ROOT = Path(__file__).resolve().parent.parent
PILLARS = ("serving", "disagg", "autoconfig", "kernels", "deploy", "loadtest")
# What a framework calls: commands of typer, routes of FastAPI, validators and serializers of pydantic.
CALLED_BY_FRAMEWORKS = (
    "@*.command",
    "@*.callback",
    "@*.get",
    "@*.post",
    "@*.delete",
    "@*.api_route",
    "@*.exception_handler",
    "@*.middleware",
    "@model_validator",
    "@field_validator",
    "@field_serializer",
    "@model_serializer",
    "@computed_field",
)


class _Names(core.Vulture):  # type: ignore[misc]
    """Vulture, for which `__all__` is no use."""

    def visit_Assign(self, node: ast.Assign) -> None:
        """Leave `__all__` alone: its strings are names that somebody else may want."""


def unused_names(root: Path, folders: Iterable[str]) -> Iterator[str]:
    """`file:name` of every function, class, method and variable that no source names elsewhere."""
    found = _Names(ignore_decorators=CALLED_BY_FRAMEWORKS)
    found.scavenge([str(root / folder) for folder in folders])
    for item in found.get_unused_code():
        if item.typ != "import":  # ruff's, who knows which of them are offered on
            yield f"{Path(item.filename).resolve().relative_to(root)}:{item.name}"


def unreached_modules(root: Path, folders: Iterable[str]) -> Iterator[str]:
    """The file of every module that no program imports, however far around.

    Programs are modules that run as `__main__` and what pyproject's scripts name. A package's `__init__` that offers a
    name on leads to the module of that name only for those who import it. A string that names a module is an import
    too; beside a call of `import_module` it may name one of the same package.
    """
    files = {_dotted(path, root / folder): path for folder in folders for path in (root / folder).rglob("*.py")}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    offers = {name: dict(_offered(trees[name])) for name, path in files.items() if path.name == "__init__.py"}
    scripts = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("scripts", {})
    todo = [name for name in files if name.endswith("__main__") or _is_program(trees[name])]
    todo += [at.split(":")[0] for at in scripts.values()]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name not in files:
            continue
        seen.add(name)
        package = name if name in offers else name.rpartition(".")[0]
        todo += [package, package.rpartition(".")[0], *_needs(trees[name], offers, package, own_offers=name in offers)]
    yield from sorted(str(files[name].relative_to(root)) for name in set(files) - seen)


def _is_program(tree: ast.Module) -> bool:
    """Whether the module ends with `if __name__ == "__main__"`."""
    return any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in tree.body)


def _needs(tree: ast.Module, offers: dict[str, dict[str, str]], package: str, *, own_offers: bool) -> Iterator[str]:
    """The modules that a module imports or names; of an `__init__` without those that it only offers on."""
    offered = dict(_offered(tree)) if own_offers else {}
    by_name = any(isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func) for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) not in offered:
                    yield from _behind(node.module, alias.name, offers)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"plait\w*(\.\w+)+(:\w+)?", node.value):
                yield node.value.split(":")[0]
            elif by_name and re.fullmatch(r"\w+(:\w+)?", node.value):
                yield f"{package}.{node.value.split(':')[0]}"


def _behind(module: str, name: str, offers: dict[str, dict[str, str]]) -> Iterator[str]:
    """Where `from module import name` leads: the module, one of that name in it, and the one that it offers it from."""
    yield module
    yield f"{module}.{name}"
    if (source := offers.get(module, {}).get(name)) is not None:
        yield from _behind(source, name, offers)


def _offered(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What an `__init__` imports at its top and does not use itself: name -> the module that it comes from."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.asname or alias.name for alias in node.names]
            yield from ((name, node.module) for name in names if name not in used)


def _dotted(path: Path, folder: Path) -> str:
    return ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def main() -> int:
    """Print what is not in the list, and what of the list fits nothing; 1 if there is any."""
    entries = tomllib.loads((ROOT / ".ci" / "unreached.toml").read_text(encoding="utf-8"))["allowed"]
    allowed = {pattern: entry["why"] for entry in entries for pattern in entry["what"]}
    found = sorted([*unused_names(ROOT, PILLARS), *unreached_modules(ROOT, PILLARS)])
    new = [what for what in found if not any(fnmatch(what, pattern) for pattern in allowed)]
    stale = [pattern for pattern in allowed if not any(fnmatch(what, pattern) for what in found)]
    for what in new:
        print(f"{what}: nothing but tests reaches it; remove it, wire it, or list it in .ci/unreached.toml")
    for pattern in stale:
        print(f".ci/unreached.toml: {pattern} fits nothing any more")
    return 1 if new or stale else 0


if __name__ == "__main__":
    sys.exit(main())
