"""Commands of plait and of others in processes of their own, and environments for peers that would disturb ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from plait_bench.errors import BenchError, SystemFailed, SystemUnavailable

PLAIT = (sys.executable, "-m", "plait.cli.main")
_STOP_S, _INSTALL_S = 90.0, 1800.0


def run_command(
    command: Sequence[str], *, limit_s: float, environ: Mapping[str, str] | None = None, fine: Sequence[int] = (0,)
) -> str:
    """Return what a command prints on stdout; its progress goes where ours goes. Raises `SystemFailed`."""
    what = " ".join([Path(command[0]).name, *command[1:5]])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, **(environ or {})},
            timeout=limit_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemFailed(f"{what}: {error}") from error
    if done.returncode not in fine:
        raise SystemFailed(f"{what} ended with {done.returncode}: its message is above")
    return done.stdout


@contextmanager
def serving_plait(
    config: Path, *, environ: Mapping[str, str] | None = None, command: Sequence[str] = PLAIT
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `plait serve` with its state beside the configuration; yield the process and the URL once it is ready, and
    stop it. Raises `SystemFailed`."""
    own = {"PLAIT_STATE_DIR": str(config.parent / "state"), **(environ or {})}
    process = subprocess.Popen(
        [*command, "serve", str(config)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env={**os.environ, **own},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if not (url := process.stdout.readline().strip()):
            raise SystemFailed("plait serve did not start: its message is above")
        yield process, url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        process.kill()
        process.wait()
        process.stdout.close()


def write_random_model(folder: Path, *words: str) -> None:
    """Have `plait models random` write a model, so that this process needs no torch. Raises `SystemFailed`."""
    run_command([*PLAIT, "models", "random", *words, "--out", str(folder)], limit_s=_INSTALL_S)


def environment(folder: Path, pins: Sequence[str], *, dropped: Sequence[str] = ()) -> Path:
    """Return the Python of a virtual environment with these packages, but without those `dropped`, which is made if it
    is missing or has others. Raises `SystemUnavailable`."""
    python, mark = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(pins) + "\n"
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"plait bench: installing {pins[0]} into {folder} (once)", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "--quiet"]
    try:
        run_command([sys.executable, "-m", "venv", str(folder)], limit_s=_INSTALL_S)
        run_command([*pip, "install", *pins], limit_s=_INSTALL_S)
        if dropped:
            run_command([*pip, "uninstall", "--yes", *dropped], limit_s=_INSTALL_S)
    except BenchError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SystemUnavailable(f"{pins[0]} cannot be installed: {error}") from error
    mark.write_text(wanted, encoding="utf-8")
    return python
