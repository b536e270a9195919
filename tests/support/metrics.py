"""What a text in Prometheus' format says."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from plait_serving.replica_metrics import exposition


def found(metrics: str | list[Metric], name: str, /, **labels: str) -> list[float]:
    """The values of the samples of that name with at least these labels."""
    text = metrics if isinstance(metrics, str) else exposition(metrics)
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [it.value for it in samples if it.name == name and labels.items() <= it.labels.items()]


def total(metrics: str | list[Metric], name: str, /, **labels: str) -> float:
    """Their sum; there must be one."""
    values = found(metrics, name, **labels)
    assert values, f"no {name} with {labels}"
    return sum(values)
