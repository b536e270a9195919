"""What the engine says of itself and of its host."""

from __future__ import annotations

from plait_fabric.cores import instruction_set
from plait_serving.cores import HostCores
from plait_serving.deployments.images.hosted import host_metrics_text


def test_a_host_with_more_threads_than_cores_is_labelled_shared() -> None:
    """Both numbers are there, and the verdict as 0 or 1."""
    text = host_metrics_text(HostCores(cores=2, planned_threads=3))
    assert "plait_host_cores 2\n" in text
    assert "plait_host_threads_planned 3\n" in text
    assert "# TYPE plait_host_shared gauge\nplait_host_shared 1\n" in text
    assert "plait_host_shared 0\n" in host_metrics_text(HostCores(cores=2, planned_threads=2))
    assert text.endswith(f'plait_host_instruction_set{{name="{instruction_set()}"}} 1\n')
