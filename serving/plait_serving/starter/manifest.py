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
    try:
        listed = {name: str(it["sha256"]) for name, it in json.loads(path.read_text(encoding="utf-8"))["files"].items()}
        present = {name: sha256_of(folder / name) for name in files_in(folder)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"what is there cannot be compared with the manifest ({error})"]
    problems = [f"{name} is missing" for name in listed if name not in present]
    problems += [f"{name} is not in the manifest" for name in present if name not in listed]
    differing = [name for name, sum_ in listed.items() if present.get(name, sum_) != sum_]
    return problems + [f"{name} differs from the manifest" for name in differing]
