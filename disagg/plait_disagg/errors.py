"""What can go wrong with a ranking request. Each says what the caller can do; HTTP decides the status."""

from __future__ import annotations

__all__ = ["BadInput", "Busy", "DeadlinePassed", "RankError", "UnknownModel", "WorkerUnavailable"]


class RankError(Exception):
    """The base of all; on its own it is a bug or a broken worker."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadInput(RankError):
    """The request can never work; ``param`` names the tensor or field."""


class UnknownModel(RankError):
    """No such model or version."""


class Busy(RankError):
    """Too many requests wait; the same one can work a little later."""


class DeadlinePassed(RankError):
    """The request's deadline passed before its answer was there."""


class WorkerUnavailable(RankError):
    """A worker is gone or not there yet; it is being started again."""
