"""Errors of the tuning job queue.

JobQueueError
├── InvalidJob   the job must be written differently
├── NoSuchJob    there is no job with this id
├── Conflict     the job is over
├── TooMany      too many jobs are waiting
└── Unreadable   the job's folder is damaged
"""

from __future__ import annotations

from plait.errors import PlaitError


class JobQueueError(PlaitError):
    """One sentence for the sender of the request. `param`: the part of the job that must change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)  # both, so that it survives the way between processes
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class InvalidJob(JobQueueError):
    """The job must be specified differently."""


class NoSuchJob(JobQueueError):
    """There is no job with this id."""


class Conflict(JobQueueError):
    """The job is over."""


class TooMany(JobQueueError):
    """Too many jobs are waiting."""


class Unreadable(JobQueueError):
    """The job's folder is damaged."""
