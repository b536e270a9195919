"""Accepts a GPU, as far as the time goes: `python -m plait_bench.gpu --out FOLDER`.

For a borrowed machine. It asks for Python 3.11 or newer with torch, Triton and transformers; `--wheels FOLDER` brings
the few packages that such a machine lacks. Where there is a package index, `python -m plait_bench.gpu --wheels FOLDER`
alone collects them. What is worth most comes first, each row is written as it comes, and what fails fails alone.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from importlib.metadata import version
from pathlib import Path

PARTS = {
    "sdxl": "plait_bench.gpu.denoisers:sdxl",
    "operators": "plait_bench.gpu.operators:operators",
    "sd15": "plait_bench.gpu.denoisers:sd15",
    "flux": "plait_bench.gpu.transformers:flux",
    "controlnet": "plait_bench.gpu.controlnets:controlnet",
    "switching": "plait_bench.gpu.switching:switching",
    "dense": "plait_bench.gpu.dense:dense",
}
"""Each a function, in the order of what it is worth."""

PACKAGES = (
    "diffusers", "importlib_metadata", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "orjson",
)  # fmt: skip
"""What plait's engines want beside torch, transformers and what these bring."""
_MAX_WHEEL_BYTES = 18_000_000
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> int:
    """Run the parts; return 1 if one failed or differed."""
    parser = argparse.ArgumentParser(prog="python -m plait_bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where rows.jsonl and log.txt go")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin nothing after so long")
    parser.add_argument("--wheels", type=Path, help="packages that this interpreter lacks; without --out: fetch them")
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU: whether it runs at all")
    given = parser.parse_args()
    began_s = time.monotonic()
    if given.out is None:
        if given.wheels is None:
            parser.error("say where rows go: --out FOLDER")
        collect(given.wheels)
        return 0
    if given.wheels is not None:
        add_wheels(given.wheels)
    from plait_bench.gpu.rows import GpuRun

    run = GpuRun(given.out, ends_s=began_s + 60 * given.minutes, tiny=given.tiny)
    for name in given.part or PARTS:
        if run.left_s <= 0:
            run.row(name, "all", 1, metric="skipped", unit="")
            continue
        module, _, function = PARTS[name].partition(":")
        try:
            getattr(importlib.import_module(module), function)(run)
        except Exception as error:
            run.log(traceback.format_exc())
            run.failed(name, f"{type(error).__name__}: {error}")
        run.free()
    return int(run.has_failed)


def add_wheels(folder: Path) -> None:
    """Make what the wheels of a folder hold importable, behind what this interpreter has."""
    unpacked = Path(tempfile.mkdtemp(prefix="plait-wheels-"))
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    sys.path.append(str(unpacked))


def collect(folder: Path) -> None:
    """Fetch the wheels for Python 3.12 on x86-64 of the versions that are installed here."""
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    platforms = [argument for each in _PLATFORMS for argument in ("--platform", each)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    more = ["--python-version", "3.12", "--implementation", "cp", *platforms, "--dest", str(folder)]
    subprocess.run([*command, *more, *wanted], check=True)
    total = sum(path.stat().st_size for path in folder.glob("*.whl"))
    if total > _MAX_WHEEL_BYTES:
        raise SystemExit(f"{folder}: the wheels are {total / 1e6:.1f} MB, more than {_MAX_WHEEL_BYTES / 1e6:.0f}")
    print(f"{folder}: {total / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
