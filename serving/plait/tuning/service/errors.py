"""Errors of the tuning job queue.

JobQueueError
├── InvalidJob   the job must be written differently
├── NoSuchJob    there is no job with this id
├── Conflict     the job is over
├── TooMany      too many jobs are waiting
└── Unreadable   the job's folder is damaged
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from plait_serving.http.edge.errors import ApiError


class JobQueueError(ApiError):
    """One sentence for the sender of the request. `param`: the part of the job that must change."""

    answer: ClassVar[tuple[int, str, Mapping[str, str]]]
    """The status, the code and the headers of the response."""

    def __init__(self, message: str, param: str | None = None) -> None:
        status, code, headers = self.answer
        super().__init__(status, message, code=code, param=param, headers=headers)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.param)  # on the way between processes


class InvalidJob(JobQueueError):
    """The job must be specified differently."""

    answer = 400, "invalid_job", {}


class NoSuchJob(JobQueueError):
    """There is no job with this id."""

    answer = 404, "job_not_found", {}


class Conflict(JobQueueError):
    """The job is over."""

    answer = 409, "job_is_over", {"x-should-retry": "false"}


class TooMany(JobQueueError):
    """Too many jobs are waiting."""

    answer = 429, "too_many_jobs", {"retry-after": "60"}


class Unreadable(JobQueueError):
    """The job's folder is damaged."""

    answer = 500, "job_unreadable", {"x-should-retry": "false"}
