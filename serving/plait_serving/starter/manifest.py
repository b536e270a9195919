"""The list of files that belong to the starter models, each with its sha256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
MANIFEST = "MANIFEST.json"


def files_in(folder: Path) -> list[str]:
    """Return all files below `folder` but the manifest, as sorted relative POSIX paths."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Write `MANIFEST.json`: size and sha256 of every file below `folder`."""
    entries = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in files_in(folder)
    }
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")


def manifest_problems(folder: Path) -> list[str]:
    """Return one sentence for each file that is missing, changed or not listed; empty if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return [f"{MANIFEST} is missing"]
    listed = json.loads(path.read_text(encoding="utf-8"))["files"]
    present = set(files_in(folder))
    problems = [f"{name} is missing" for name in listed if name not in present]
    problems += [f"{name} is not in the manifest" for name in sorted(present - listed.keys())]
    problems += [
        f"{name} differs from the manifest"
        for name, entry in listed.items()
        if name in present and sha256_of(folder / name) != entry["sha256"]
    ]
    return problems
