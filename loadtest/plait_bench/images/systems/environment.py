"""The Python environment of the OpenVINO peer: its libraries need older versions of ours.

It is made once, beside the other caches of the benchmarks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plait_bench.cache import cache_folder
from plait_bench.errors import SystemUnavailable

__all__ = ["PINS", "interpreter", "requirements"]

PINS = (
    "optimum-intel[openvino]==2.2.0",
    "openvino==2026.4.1",
    "diffusers==0.39.0",
    "transformers==5.5.4",
    "pillow",
)
_INSTALL_S = 1800


def requirements() -> tuple[str, ...]:
    """Return what is installed: the pins, and torch in the very build that is here (a CPU build stays one)."""
    try:
        return (*PINS, f"torch=={version('torch')}")
    except PackageNotFoundError:
        return PINS


def interpreter() -> Path:
    """Return the environment's Python; make the environment if it is missing or old. Raises `SystemUnavailable`."""
    folder = cache_folder() / "openvino"
    python, mark = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements()) + "\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"plait bench: installing {PINS[0]} into {folder} (once)", file=sys.stderr, flush=True)
    try:
        _call(sys.executable, "-m", "venv", str(folder))
        _call(str(python), "-m", "pip", "install", "--quiet", *requirements())
        # Required by optimum-intel, used by nothing here, and an index may offer a build for another torch.
        _call(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        why = lines[-1] if lines else type(error).__name__
        raise SystemUnavailable(f"openvino cannot be installed: {why}") from error
    mark.write_text(wanted, encoding="utf-8")
    return python


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
