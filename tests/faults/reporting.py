"""A fault run for people: tables of ends, recoveries and of what was held."""

from __future__ import annotations

from collections.abc import Iterator

from faults.ends import End, Tally
from faults.run import FaultReport
from faults.usage import described

__all__ = ["fault_text"]


def fault_text(report: FaultReport) -> str:
    """Return the tables of a report."""
    return "\n".join(_lines(report))


def _lines(report: FaultReport) -> Iterator[str]:
    whole = report.all_ends
    yield f"{whole.total} requests in {report.seconds:.0f} s, seed {report.plan.seed}, {len(report.faults)} faults"
    yield ""
    yield f"{'fault':<26}{'requests':>9}" + "".join(f"{end.value:>13}" for end in End)
    for name, part in report.ends.items():
        yield _counts(name, part)
    yield _counts("all", whole)
    yield _counts("(probes)", report.probes)
    yield _counts("(afterwards)", report.after)
    yield ""
    yield f"right: {whole.right_share:.1%} of those that stayed"
    for what, count in (whole.seen + report.probes.seen).most_common():
        yield f"{count:>6}  {what}"
    yield ""
    yield f"{'recovery':<26}{'right answer':>13}{'process back':>13}"
    for fault in report.faults:
        yield f"{fault.name:<26}{_seconds(fault.answered_s):>13}{_seconds(fault.replaced_s):>13}"
    yield ""
    yield from described([("before", report.held_before), ("after", report.held_after)])
    yield ""
    yield from (f"PROBLEM: {problem}" for problem in report.problems)
    if not report.problems:
        yield "passed"


def _counts(name: str, part: Tally) -> str:
    return f"{name:<26}{part.total:>9}" + "".join(f"{part.ends[end]:>13}" for end in End)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
