"""How much of an engine's capacity is used."""

from __future__ import annotations

import pytest

from plait_serving.diffusion.queue.pressure import engine_pressure


@pytest.mark.parametrize(
    ("compute_s", "queued_s", "pressure"),
    [(0.0, 0.0, 0.0), (5.0, 0.0, 0.5), (10.0, 3.0, 1.0), (0.0, 5.0, 0.5), (2.0, 15.0, 1.5), (10.0, 900.0, 2.0)],
    ids=["idle", "half busy", "busy", "while a model loads", "more waits than it does", "a backlog"],
)
def test_the_pressure_is_what_computes_or_what_waits(compute_s, queued_s, pressure):
    """Whichever is more, over ten seconds; bounded, since a backlog does not say how many replicas are missing."""
    before = {"compute_s": 7.0, "queued_s": 0.0}
    after = {"compute_s": 7.0 + compute_s, "queued_s": queued_s}
    assert engine_pressure(before, after, 10.0) == pytest.approx(pressure)
