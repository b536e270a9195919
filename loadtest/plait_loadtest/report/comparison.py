"""A comparison as text for people and as JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from plait_loadtest.compare import Comparison, MetricChange
from plait_loadtest.report.document import rounded
from plait_report.page import number


def as_document(outcome: Comparison) -> str:
    """Return one JSON document: `regressed`, `changes`, `differences`."""
    changes = [{key: _plain(value) for key, value in asdict(change).items()} for change in outcome.changes]
    document = {"regressed": outcome.regressed, "changes": changes, "differences": list(outcome.differences)}
    return json.dumps(document, indent=1)


def as_text(outcome: Comparison) -> str:
    """Return a text: first what changed, then what did not."""
    lines = [_line(change) for change in sorted(outcome.changes, key=lambda change: change.verdict == "same")]
    if outcome.differences:
        lines.append(f"the scenarios differ in {', '.join(outcome.differences)}")
    lines.append("got worse" if outcome.regressed else "no regression beyond noise")
    return "\n".join(lines)


def _line(change: MetricChange) -> str:
    what = f"{change.kind} {change.metric}"
    values = f"{number(change.before)} -> {number(change.after)}"
    unit = "" if change.metric in ("attainment", "error_rate") else " %"
    scale = 100.0 if unit else 1.0
    moved = f"{change.change * scale:+.3g}{unit} ({change.low * scale:+.3g} to {change.high * scale:+.3g})"
    return f"{change.verdict:<7} {what:<28} {values:<24} {moved}"


def _plain(value: Any) -> Any:
    return rounded(value) if isinstance(value, float) else value
