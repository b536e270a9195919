"""The deployment class of a base model, without a cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from fakes.images import FAKE_CATALOG, FAKE_REQUEST
from fakes.serve import FakeHosted
from plait_kernels.heartbeat import Stuck
from plait_serving.deployments.images.catalog_pieces import Accepted, unpacked
from plait_serving.deployments.images.engine import EngineReplica, portable
from plait_serving.diffusion.errors import EngineError, EngineStopped, NotFound
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.values import Failed, Finished, Preview, Progress
from support.prometheus import total


def test_the_thread_that_steps_waits_briefly_for_the_interpreter():
    """Each of its operations needs it, beside threads that read LoRA files and answer."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(5e-3)
        EngineReplica(lambda _: FakeHosted(step_s=0.0), {})
        assert sys.getswitchinterval() < 1e-3
    finally:
        sys.setswitchinterval(before)


async def test_serve_replica_streams_reconfigures_and_drains():
    """The deployment passes events on, validates knobs, and refuses requests once it drains."""
    hosted = FakeHosted(step_s=0.0)
    replica = EngineReplica(lambda _: hosted, {"edges": object()})
    events = [event async for event in replica.generate(FAKE_REQUEST)]
    assert events[0] == Accepted()
    assert isinstance(events[-1], Finished)
    head, *pieces = [piece async for piece in replica.catalog("")]
    assert head.start_s > 0
    assert unpacked(pieces) == FAKE_CATALOG
    assert [piece async for piece in replica.catalog(head.digest)] == [head]
    assert await replica.refused() == {}
    metrics = await replica.metric_families()
    assert total(metrics.families, "fake_steps_total") > 0
    assert str(os.getpid()) in metrics.replica
    replica.reconfigure({"largest_batch": 3})
    assert hosted.knobs == [EngineKnobs(largest_batch=3)]
    with pytest.raises(ValueError, match="largest_batch"):
        replica.reconfigure({"largest_batch": 0})
    assert (await replica.health()).ready
    await replica.drain(1.0)
    assert not (await replica.health()).ready
    (event,) = [event async for event in replica.generate(FAKE_REQUEST)]
    assert isinstance(event.error, EngineStopped)
    replica.check_health()


async def test_serve_replica_thins_progress_and_nothing_else():
    """However fast the steps, only some progress events cross the handle; previews and the end always do."""
    replica = EngineReplica(lambda _: FakeHosted(step_s=0.0), {})
    many = replace(FAKE_REQUEST, steps=50, partial_images=3, wants_progress=True)
    kinds = [type(event) for event in [event async for event in replica.generate(many)]]
    assert 1 <= kinds.count(Progress) < 50
    assert kinds.count(Preview) == 3
    assert kinds[-1] is Finished
    await replica.drain(0)


async def test_serve_replica_reports_a_first_step_to_who_reads_no_progress():
    """Each event costs both replicas time; that the request survived a step is news all the same."""
    replica = EngineReplica(lambda _: FakeHosted(step_s=0.15), {})
    events = [event async for event in replica.generate(FAKE_REQUEST)]
    kinds = [type(event) for event in events if event != Accepted()]
    assert kinds.count(Progress) == 1
    assert kinds.count(Preview) == 1
    await replica.drain(0)


@pytest.mark.parametrize(
    ("broken", "error", "says"),
    [
        ({"alive": False}, RuntimeError, "compute thread"),
        ({"stuck": Stuck("a step of 4 rows has not ended within 65 s")}, Stuck, "4 rows"),
    ],
)
async def test_serve_replica_reports_a_compute_thread_that_died_or_hangs(broken, error, says):
    """Serve replaces it, although its thread is alive and gets nowhere (finding 9); one that is on its way out is not
    asked any more."""
    hosted = FakeHosted(step_s=0.0)
    replica = EngineReplica(lambda _: hosted, {})
    replica.check_health()
    vars(hosted).update(broken)
    with pytest.raises(error, match=says):
        replica.check_health()
    await replica.drain(0)
    replica.check_health()


async def test_serve_replica_cancels_the_request_of_a_closed_stream():
    """Closing the stream on the replica closes the engine's generator."""
    hosted = FakeHosted(step_s=0.01)
    replica = EngineReplica(lambda _: hosted, {})
    events = replica.generate(FAKE_REQUEST)
    assert await anext(events) == Accepted()
    await anext(events)
    await events.aclose()
    assert hosted.cancelled == ["r"]
    await replica.drain(0)


def test_serve_portable_keeps_engine_errors_and_hides_bugs():
    """An error that might not pickle, or might tell too much, is reduced to its kind."""
    known = Failed(error=NotFound("x", param="model"))
    assert portable(known) is known
    hidden = portable(Failed(error=ValueError("secret")))
    assert isinstance(hidden.error, EngineError)
    assert "secret" not in hidden.error.message
    assert "ValueError" in hidden.error.message
