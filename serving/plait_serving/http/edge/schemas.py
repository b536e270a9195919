"""What the bodies of all workloads share: strictness of parsing, the bound on deadlines, the error format."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["MAX_DEADLINE_MS", "ErrorBody", "ErrorDetail", "StrictBody"]

MAX_DEADLINE_MS = 24 * 3_600_000


class StrictBody(BaseModel):
    """A body whose unknown fields are refused, and whose numbers are strict: `true` is not 1, `"20"` is not 20."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ErrorDetail(BaseModel):
    """`param` is dotted, for example `loras.0.name`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every 4xx and 5xx response."""

    error: ErrorDetail
