"""What the engine says of itself and of its host."""

from __future__ import annotations

from plait_kernels.cores import instruction_set
from plait_serving.cores import HostCores
from plait_serving.deployments.images.counted import host_families
from support.prometheus import total


def test_a_host_with_more_threads_than_cores_is_labelled_shared() -> None:
    """Both numbers are there, and the verdict as 0 or 1."""
    families = host_families(HostCores(cores=2, planned_threads=3))
    assert total(families, "plait_host_cores") == 2
    assert total(families, "plait_host_threads_planned") == 3
    assert total(families, "plait_host_shared") == 1
    assert total(host_families(HostCores(cores=2, planned_threads=2)), "plait_host_shared") == 0
    assert total(families, "plait_host_instruction_set", name=instruction_set()) == 1
