"""What the desk of tuning jobs can not do for a request.

DeskError
├── Refused      the job must be written differently
├── NoSuchJob    there is no job with this id
├── Conflict     the job is over
├── TooMany      too many jobs are waiting
└── Unreadable   the job's folder is damaged
"""

from __future__ import annotations

from plait.errors import PlaitError

__all__ = ["Conflict", "DeskError", "NoSuchJob", "Refused", "TooMany", "Unreadable"]


class DeskError(PlaitError):
    """One sentence for whoever sent the request. ``param``: the part of the job that must change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)  # both, so that it survives the way between processes
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class Refused(DeskError):
    """The job must be written differently."""


class NoSuchJob(DeskError):
    """There is no job with this id."""


class Conflict(DeskError):
    """The job is over."""


class TooMany(DeskError):
    """Too many jobs are waiting."""


class Unreadable(DeskError):
    """The job's folder is damaged."""
