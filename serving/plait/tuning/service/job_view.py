"""The representation of a tuning job in the HTTP API, and of what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from plait_autoconfig.jobs.loop import JobEvent
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.report.page import verdict
from plait_serving.http.edge.errors import ApiError

PROGRESS = "progress.json"

_ANSWERS: Mapping[str, tuple[int, Mapping[str, str]]] = {
    "invalid_job": (400, {}),  # it must be written differently
    "job_not_found": (404, {}),
    "job_is_over": (409, {"x-should-retry": "false"}),
    "too_many_jobs": (429, {"retry-after": "60"}),  # are waiting
    "job_unreadable": (500, {"x-should-retry": "false"}),  # its folder is damaged
    "job_not_kept": (500, {"x-should-retry": "false"}),  # the folder of all jobs cannot be written: a full disk
}


class JobQueueError(ApiError):
    """One sentence for the sender of the request. `code`: one of `_ANSWERS`; `param`: the part of the job that must
    change."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        status, headers = _ANSWERS[code]
        super().__init__(status, message, code=code, param=param, headers=headers)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.message, self.param)  # on the way between processes


def job_summary(ticket: Mapping[str, Any], status: str, reason: str, state: JobState) -> dict[str, Any]:
    """Return the summary of a job for lists and events. `knobs` are named as `plait tune apply` sets them."""
    best, left = state.best, state.remaining
    return {
        **_whose(ticket),
        "status": status,
        "phase": state.phase,
        "reason": reason or state.reason,
        "headline": verdict(state),
        "objective": str(state.spec.goal),
        "trials": {"done": left.used_trials, "budget": state.spec.budget.trials},
        "used_s": round(left.used_s, 3),
        "left_s": None if left.seconds is None else round(left.seconds, 3),
        "best": None
        if best is None
        else {"knobs": state.spec.settings(best.config), "metrics": dict(best.metrics), "gain": dict(best.gain)},
        "recommended": [
            {
                "knobs": state.spec.settings(answer.config),
                "metrics": dict(answer.metrics),
                "gain": {name: each.value for name, each in answer.gain.items()},
                "confirmed": answer.confirmed,
                "sentence": answer.sentence,
            }
            for answer in state.answers
        ],
        "binding": state.binding,
        "warnings": list(state.warnings),
    }


def unreadable_summary(ticket: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the summary of a job whose folder cannot be read."""
    return {**_whose(ticket), "status": "failed", "reason": reason}


def write_progress(folder: Path, event: JobEvent) -> None:
    """Write the current progress into the job's folder, replacing the previous one."""
    write_json(folder / PROGRESS, {"kind": event.kind, "text": event.text, "number": event.number})


def write_json(path: Path, content: Any) -> None:
    """Write a file of a job's folder atomically."""
    partial = path.with_name(f"{path.name}.new")
    partial.write_bytes(to_json(content))
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return what `write_json` wrote; None if there is none, or what a host that lost power left of it."""
    try:
        found = from_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _whose(ticket: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: ticket[name] for name in ("id", "name", "tenant")}
    return {"object": "tuning.job", **own, "created": int(ticket["created_s"])}
