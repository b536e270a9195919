"""A process that receives commands line by line and answers each with one line: `ok`, or an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from plait_bench.errors import SystemFailed

__all__ = ["PipedProcess", "WorkerPipes"]


class WorkerPipes:
    """The two pipes of a process; for a worker, a `Fleet` of one. Only one thread at a time may send."""

    def __init__(self, role: str, stdin: IO[str], stdout: IO[str]) -> None:
        self.role = role
        self._stdin, self._stdout = stdin, stdout

    @property
    def pipes(self) -> tuple[int, int]:
        """The file descriptors of the process's input and output."""
        return self._stdin.fileno(), self._stdout.fileno()

    def tell(self, line: str) -> SystemFailed | None:
        """Send a line; return the error that the process answered with, or None."""
        self._stdin.write(line + "\n")
        self._stdin.flush()
        said = self._stdout.readline().strip()
        return None if said == "ok" else SystemFailed(said or f"the {self.role} ended")

    def stage(self, folder: object) -> Mapping[str, Exception | None]:
        """Have the worker stage the update in a folder; return its error by role."""
        return {self.role: self.tell(f"stage {folder}")}

    def switch(self, version: str) -> Mapping[str, Exception | None]:
        """Have the worker switch to a version; return its error by role."""
        return {self.role: self.tell(f"switch {version}")}


class PipedProcess(WorkerPipes):
    """A child of this process: `python -m MODULE ARGUMENTS...`."""

    def __init__(self, role: str, module: str, *arguments: str, pass_fds: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(role, self._process.stdin, self._process.stdout)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait()
