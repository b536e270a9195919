"""Errors that a ranking request can end with. Each tells the caller how to react; the HTTP layer picks the status."""

from __future__ import annotations


class RankError(Exception):
    """Base class of all ranking errors; raised on its own, it means a bug or a broken worker. `retry_after_s`: when the
    same request may succeed, if that is known."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadInput(RankError):
    """The request is invalid and can never succeed; `param` names the tensor or field, `place` which of a tensor's
    numbers (flat) it is, if it is one."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None, place: int | None = None
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.place = place


class UnknownModel(RankError):
    """There is no such model or version."""


class Busy(RankError):
    """Too many requests are waiting; the same request may succeed a little later."""


class DeadlinePassed(RankError):
    """The request's deadline passed before its answer was ready."""


class WorkerUnavailable(RankError):
    """A worker is lost or not ready yet; it is being restarted."""
