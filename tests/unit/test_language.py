"""One language: names and prose use the words of ARCHITECTURE's glossary, and a class name means one thing."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("serving", "disagg", "autoconfig", "kernels", "deploy", "loadtest")

RETIRED_IN_NAMES = {
    "picture": "image",
    "pictures": "images",
    "recommend": "rank",
    "recommender": "ranker",
    "recommenders": "rankers",
    "largest": "max",
    "smallest": "min",
    "most": "max",
    "least": "min",
    "told": "what was reported",
    "telling": "a view",
    "foreign": "untrusted",
    "underway": "pending",
    "apart": "separate",
    "hopeless": "unreachable",
    "desk": "a queue or a registry",
    "shelf": "cache policy",
    "sureness": "uncertainty",
    "elsewhere": "downstream",
}
"""Parts of names (between underscores and capitals), and what to write instead."""

CONTRACTS = {
    # Keys of plait.yaml, of packages, jobs and scenarios; flags; fields of recorded rows; names in the API's schema.
    "largest_batch", "largest_batch_rows", "largest_candidates", "largest_waiting", "largest_body_bytes", "largest",
    "largest_pixel_difference", "least_bytes", "least_gain", "least_trials", "least_change", "most_drift", "recommend",
    "recommender", "RecommendBody", "RecommendResponse", "at_least", "at_most",
}  # fmt: skip

SUPERLATIVES = {"most_urgent", "most_promising", "most_used", "least_used", "least_recently_used", "least_squares"}
"""An order, not a bound."""

RETIRED_IN_PROSE = {
    r"pictures?": "image",
    r"can not": "cannot",
    r"which see": "name it, or leave it out",
    r"under ?way": "in flight, running",
    r"hopeless": "cannot meet the SLO",
    r"strangers?": "unauthenticated client, unknown",
    r"is told|are told|was told|were told": "receives, is notified of",
}


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def _documents() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [ROOT / name for name in listed.stdout.splitlines() if name != "CHANGELOG.md"]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module names itself: classes, functions, arguments, attributes and module-level constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute):
                    yield target.attr


def _parts(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _is_contract(name: str) -> bool:
    bare = name.strip("_").lower()
    allowed = {word.lower() for word in CONTRACTS} | SUPERLATIVES
    return bare in allowed or any(phrase in bare for phrase in SUPERLATIVES | {"at_least", "at_most"})


def test_names_use_the_glossary():
    """No class, function, argument, attribute or module is named by a retired word."""
    found = []
    for path in _sources():
        for name in {path.stem, *_defined_names(_tree(path))}:
            wrong = _parts(name) & RETIRED_IN_NAMES.keys()
            if wrong and not _is_contract(name):
                found.append(f"{path.relative_to(ROOT)}: {name} ({', '.join(RETIRED_IN_NAMES[w] for w in wrong)})")
    assert sorted(found) == []


def test_a_class_name_means_one_thing():
    """A class name is unique in the repository."""
    where = defaultdict(list)
    for path in _sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def _prose_of_module(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _prose_of_document(path: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "", line)


def test_prose_uses_the_glossary():
    """No docstring, comment or document uses a retired word."""
    rules = [(re.compile(rf"\b({words})\b", re.IGNORECASE), better) for words, better in RETIRED_IN_PROSE.items()]
    found = []
    for path in [*_sources(), *_documents()]:
        prose = _prose_of_module if path.suffix == ".py" else _prose_of_document
        for number, text in prose(path):
            for rule, better in rules:
                if match := rule.search(re.sub(r"`[^`]*`", "", text)):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r} (better: {better})")
    assert found == []


def test_docstrings_say_something():
    """No docstring is only a reference to another one."""
    found = []
    for path in _sources():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if re.fullmatch(r"See .{0,80}?\.?", text.strip()):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert found == []
