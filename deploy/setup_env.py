"""Create `.venv` with plait in it. Standard library only: it runs before anything is installed.

Announces the downloads before they start, because the default index offers a CUDA build of torch that is some twenty
times larger than the CPU build.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CPU_HINT = 'make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"'
# Download sizes of torch 2.13 for Linux, Python 3.11, rounded: wheel alone (CPU), wheel plus NVIDIA libraries (CUDA).
CPU_MB, CUDA_MB, REST_MB = 190, 3000, 350


def torch_build(pip: list[str], pip_args: list[str]) -> str:
    """Return 'installed', 'cpu', 'cuda' or 'unknown': what pip would install for our torch pin, without installing
    it."""
    pin = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    requirement = pin.group(0) if pin else "torch"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *pip,
            "install",
            "--quiet",
            "--dry-run",
            "--no-deps",
            "--report",
            str(report),
            *pip_args,
            requirement,
        ]
        if subprocess.run(command, check=False).returncode != 0:
            return "unknown"
        found = json.loads(report.read_text())["install"]
    if not found:
        return "installed"
    metadata = found[0]["metadata"]
    needs_cuda = any(need.startswith(("nvidia-", "cuda-")) for need in metadata.get("requires_dist", []))
    return "cuda" if needs_cuda and "+cpu" not in metadata["version"] else "cpu"


def needs_venv(folder: Path) -> bool:
    """Return whether there is no virtual environment, or one whose making was interrupted: pip comes last into it."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "--version"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode != 0
    except OSError:
        return True


def announce(build: str) -> None:
    """Print one or two lines about the downloads of the next minutes."""
    if build == "installed":
        print("setup: torch is there; other packages are checked against constraints.txt")
    elif build == "cpu":
        print(f"setup: downloading about {CPU_MB + REST_MB} MB (torch CPU build {CPU_MB} MB, the rest {REST_MB} MB)")
    elif build == "cuda":
        print(f"setup: downloading about {CUDA_MB + REST_MB} MB: this index offers torch with CUDA ({CUDA_MB} MB).")
        print(f"setup: without an NVIDIA GPU stop now (Ctrl-C) and use the CPU build: {CPU_HINT}")
    else:
        print("setup: could not ask the index about torch; going on")
    sys.stdout.flush()


def main() -> int:
    """Create or update `.venv`; return the exit code of the first step that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--pip-args", default="")
    options = parser.parse_args()
    version = subprocess.run(
        [options.python, "-c", "import sys; print(*sys.version_info[:2])"], check=True, capture_output=True, text=True
    ).stdout.split()
    if tuple(map(int, version)) < (3, 11):
        print(f"setup: plait needs Python 3.11 or newer, {options.python} is {'.'.join(version)}", file=sys.stderr)
        return 1
    if needs_venv(VENV):
        subprocess.run([options.python, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    pip_args = shlex.split(options.pip_args)
    announce(torch_build(pip, pip_args))
    install = [*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *pip_args, "-e", f"{ROOT}[dev]"]
    code = subprocess.run(install, check=False, cwd=ROOT).returncode
    if code == 0:
        (VENV / ".ready").touch()
        print("setup: done; .venv/bin/plait is ready")
    return code


if __name__ == "__main__":
    sys.exit(main())
