"""How long a replica is expected to be away."""

from __future__ import annotations

import pytest

from plait_serving.deployments.process import estimate_s


@pytest.mark.parametrize(
    ("wall_s", "cpu_s", "expected_s"),
    [
        (9.0, 8.0, 10.0),  # alone on its cores
        (40.0, 8.5, 12.0),  # six processes started at once on two cores
        (100.0, 8.0, 27.0),  # mostly waiting for a disk
        (10.0, 16.0, 12.0),  # a model that loads with two threads
    ],
)
def test_a_start_among_others_says_little_of_one_alone(wall_s: float, cpu_s: float, expected_s: float) -> None:
    """Processor time is the measure where the first start had to share the cores (finding 10)."""
    assert estimate_s(wall_s=wall_s, cpu_s=cpu_s) == expected_s
