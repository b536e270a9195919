"""Output of a command: data to stdout, progress to stderr, and everything that libraries print to a log file."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self, TextIO


class Console:
    """Our own output lines. After `divert`, whatever else writes to stdout or stderr (Ray, C++ libraries) goes to the
    log."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err

    @classmethod
    def divert(cls, log_path: Path) -> Self:
        """Redirect file descriptors 1 and 2 of this process, and of its children, to `log_path` (appended)."""
        sys.stdout.flush()
        sys.stderr.flush()
        # dup makes descriptors that children do not inherit: a pipe behind us closes when we end, not when they do.
        out, err = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        return cls(out, err)

    def progress(self, text: str) -> None:
        """Write one line to stderr; a closed stderr does not stop a server."""
        self._write(self._err, text)

    def data(self, text: str) -> None:
        """Write one line to stdout."""
        self._write(self._out, text)

    def restore(self) -> None:
        """Restore file descriptors 1 and 2, so that the command's last messages reach the caller."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # what libraries printed, and the disk is full
                stream.flush()
        for fd, stream in ((1, self._out), (2, self._err)):
            os.dup2(stream.fileno(), fd)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):
            logging.getLogger(__name__).info("console is closed: %s", text)
