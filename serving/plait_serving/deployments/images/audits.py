"""What the audits of a process found, for `/metrics`: the engine's, and those of each ControlNet service."""

from __future__ import annotations

from plait_kernels.executors.audit import AuditStatistics

__all__ = ["audit_text"]


def audit_text(audit: AuditStatistics) -> str:
    """Return the counts in Prometheus' text format; replicas' counters add up, the largest share is the max."""
    counters = {"checked": audit.checked, "drifted": audit.drifted, "skipped": audit.skipped, "failed": audit.failed}
    share = "plait_audit_largest_share_of_tolerance"
    lines = [f"# TYPE {share} gauge\n{share} {round(audit.largest, 6)}\n"]
    for name, value in counters.items():
        lines.append(f"# TYPE plait_audit_{name}_total counter\nplait_audit_{name}_total {value}\n")
    return "".join(lines)
