"""What the audits of a process found, for `/metrics`: the engine's, and those of each ControlNet service."""

from __future__ import annotations

from plait_kernels.executors.audit import AuditStatistics

__all__ = ["audit_text"]


def audit_text(*audits: AuditStatistics) -> str:
    """Return the counts of a process's auditors in Prometheus' text format. Counters add up, the largest share is the
    max; replicas are put together likewise."""
    counters = {
        "checked": sum(audit.checked for audit in audits),
        "drifted": sum(audit.drifted for audit in audits),
        "skipped": sum(audit.skipped for audit in audits),
        "failed": sum(audit.failed for audit in audits),
    }
    largest = max((audit.largest for audit in audits), default=0.0)
    share = "plait_audit_largest_share_of_tolerance"
    lines = [f"# TYPE {share} gauge\n{share} {round(largest, 6)}\n"]
    for name, value in counters.items():
        lines.append(f"# TYPE plait_audit_{name}_total counter\nplait_audit_{name}_total {value}\n")
    return "".join(lines)
