"""What the bodies of all workloads share: strictness of parsing, the bound on deadlines, the error format."""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

MAX_DEADLINE_MS = 24 * 3_600_000
_MAX_UNKNOWN = 16


class StrictBody(BaseModel):
    """A body whose unknown fields are refused, and whose numbers are strict: `true` is not 1, `"20"` is not 20."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, data: Any) -> Any:
        """Keep a few of very many unknown fields: pydantic makes an error of each one."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields) + _MAX_UNKNOWN:
            return data
        unknown = islice((name for name in data if name not in cls.model_fields), _MAX_UNKNOWN)
        return {name: data[name] for name in (*cls.model_fields, *unknown) if name in data}


class ErrorDetail(BaseModel):
    """`param` is dotted, for example `loras.0.name`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every 4xx and 5xx response."""

    error: ErrorDetail
