"""The log that `plait serve` gives its processes, for a test that reads it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait_serving.deployments.process import LOG_PATH_VARIABLE, OUR_LOGGERS, configure_logging


class LogFile:
    """Where our loggers' lines go."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, word: str) -> list[str]:
        """Those with a word in them."""
        return [line for line in self.path.read_text(encoding="utf-8").splitlines() if word in line]


@contextmanager
def logging_to(path: Path) -> Iterator[LogFile]:
    """As a replica logs; afterwards the loggers are as they were."""
    before = {name: (it.handlers, it.level, it.propagate) for name in OUR_LOGGERS if (it := logging.getLogger(name))}
    configure_logging("replica", {LOG_PATH_VARIABLE: str(path)})
    try:
        yield LogFile(path)
    finally:
        logging.getLogger(OUR_LOGGERS[0]).handlers[0].close()
        for name, (handlers, level, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[LogFile]:
    """A file of a test."""
    with logging_to(tmp_path / "serve.log") as made:
        yield made
