"""What a check says: whether something will work, what was seen, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial


class CheckStatus(StrEnum):
    """OK; WARN: plait runs, with a caveat; FAIL: it will not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check. `advice`: what to do; empty where nothing is to be done."""

    name: str
    verdict: CheckStatus
    detail: str
    advice: str = ""


def finding(name: str, fine: bool, detail: str, advice: str, bad: CheckStatus = CheckStatus.FAIL) -> CheckResult:
    """Return a result that is a failure, with the advice, unless all is fine."""
    return CheckResult(name=name, verdict=CheckStatus.OK if fine else bad, detail=detail, advice="" if fine else advice)


warning = partial(finding, bad=CheckStatus.WARN)
"""The same with a warning."""


def listed(found: Iterable[CheckResult], *, as_json: bool) -> str:
    """Return the results for people, or as one JSON list."""
    if as_json:
        return json.dumps([asdict(each) for each in found], indent=1)
    lines: list[str] = []
    for each in found:
        lines.append(f"{each.verdict:<4}  {each.name:<9} {each.detail}")
        lines += [f"{'':15}  {each.advice}"] if each.advice else []
    return "\n".join(lines)
