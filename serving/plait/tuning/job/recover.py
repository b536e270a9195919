"""Roll back a live service whose tuner was killed: `python -m plait.tuning.job.recover PORT`, in a process of its own,
because a process can attach to only one Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from plait.errors import PlaitError, StateError
from plait.server.state import state_root
from plait.tuning.measure.application import compose_of
from plait.tuning.measure.live import LiveServer, left_notes, note_path

_LIMIT_S = 180.0


def recover_all(root: Path, *, say: Callable[[str], None]) -> None:
    """Roll back every service on this machine that a killed tuner left with a configuration that is not its own."""
    for port in left_notes(root):
        say(f"a tuner was killed while it tuned the server on port {port}; rolling back")
        command = [sys.executable, "-m", "plait.tuning.job.recover", str(port)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
            problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        except subprocess.TimeoutExpired:
            problem = f"not done after {_LIMIT_S:g} s"
        say(
            f"rolling back port {port} failed: {problem}" if problem else f"port {port} has its own configuration again"
        )


def main(arguments: list[str]) -> int:
    """Run with the arguments `PORT [module:function]`; the second names the application factory, if it is not plait's
    own."""
    root, port = state_root(os.environ), int(arguments[0])
    compose = compose_of(*arguments[1:])
    try:
        LiveServer(compose, root=root, port=port).close()
    except StateError:
        note_path(root, port).unlink(missing_ok=True)  # the server is gone, and with it what there was to roll back
    except PlaitError as error:
        print(error, file=sys.stderr)  # noqa: T201  # for the process that started us
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
