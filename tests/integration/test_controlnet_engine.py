"""An engine whose ControlNets are services: where they run, what is lost without one, and what their logs say."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.engine import EveryBatchPays
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.controlnet.service import ControlNetService
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.protocols import ControlCall
from plait_serving.diffusion.values import ControlRef, Event, Failed, Finished, ImageRequest, Progress, Scheduler
from support import controlnet as kit
from support.denoise import control_image, make_request
from support.log_file import LogFile, log_file

__all__ = ["log_file"]

WAIT_S = 120.0


@dataclass(eq=False)
class Scene:
    """An engine whose two ControlNets are services in threads."""

    engine: Engine
    edges: ControlNetService
    runner: ControlNetModelRunner

    def make(self, *requests: ImageRequest, on_step: Callable[[Progress], None] | None = None) -> dict[str, Event]:
        """Runs all at once; how each ended. ``on_step`` is called on the compute thread, between two steps."""
        ended: queue.Queue[tuple[str, Event]] = queue.Queue()

        def sink(name: str, event: Event) -> None:
            if isinstance(event, Progress) and on_step is not None:
                on_step(event)
            if isinstance(event, Finished | Failed):
                ended.put((name, event))

        for request in requests:
            self.engine.submit(request, partial(sink, request.request_id))
        return dict(ended.get(timeout=WAIT_S) for _ in requests)


@pytest.fixture
def scene(tiny_sd_folder: Path, tiny_sd_controlnets: tuple[Path, Path], tmp_path: Path) -> Iterator[Scene]:
    """A fresh engine with one replica of either ControlNet."""
    folders = dict(zip(("edges", "colors"), tiny_sd_controlnets, strict=True))
    runners = {name: load_controlnet(folder, dtype=torch.float32) for name, folder in folders.items()}
    with ExitStack() as stack:
        edges = stack.enter_context(kit.serving(runners["edges"], kit.new_address("tcp", tmp_path)))
        colors = stack.enter_context(kit.serving(runners["colors"], kit.new_address("shm", tmp_path), name="colors"))
        remote = {
            name: partial(RemoteControlNetClient, name, kit.ReplicaFleet({"thread": service.addresses[0]}).connect)
            for name, service in (("edges", edges), ("colors", colors))
        }
        settings = EngineSettings(
            model=tiny_sd_folder,
            dtype="float32",
            device="cpu",
            controlnets=folders,
            converts=False,
            knobs=EngineKnobs(threads=1, controlnet_placement=Placement.REMOTE),
        )
        engine = build_engine(settings, remote=remote, costs=EveryBatchPays())
        stack.callback(engine.stop, drain_s=0.0)
        yield Scene(engine=engine, edges=edges, runner=runners["edges"])


def _request(name: str, *controlnets: str) -> ImageRequest:
    controls = tuple(ControlRef(name=control, image=control_image(0, kit.SIZE)) for control in controlnets)
    return make_request(request_id=name, steps=6, scheduler=Scheduler.EULER, controlnets=controls)


def _image(event: Event) -> np.ndarray:
    assert isinstance(event, Finished), event
    return event.result.images[0]


def test_without_a_replica_only_requests_that_need_it_fail(scene: Scene) -> None:
    """All replicas of one ControlNet die: its request gets a clear error, its batch mates get their images."""

    def stop_them(progress: Progress) -> None:
        if progress.step == 2:
            scene.edges.stop(drain_s=0.0)

    ended = scene.make(_request("edges", "edges"), _request("colors", "colors"), _request("plain"), on_step=stop_them)
    failed = ended["edges"]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ControlNetUnavailable)
    assert "edges" in str(failed.error)
    assert not np.array_equal(_image(ended["colors"]), _image(ended["plain"]))


def test_automatic_placement_runs_both_places_and_takes_the_faster(scene: Scene) -> None:
    """It is settled by steps of users, and the image is the same wherever it was made."""
    engine, client = scene.engine, scene.engine.pool.first.controlnets["edges"]
    before, images = scene.edges.statistics().steps, []
    remote = _image(scene.make(_request("remote", "edges"))["remote"])
    engine.reconfigure(engine.knobs.model_copy(update={"controlnet_placement": Placement.AUTO}))
    while client.times is None or not images:
        assert len(images) < 8
        images.append(_image(scene.make(_request(str(len(images)), "edges"))[str(len(images))]))
    assert min(client.times.local_s, client.times.remote_s) > 0.0
    faster = Placement.REMOTE if client.times.remote_s < client.times.local_s else Placement.LOCAL
    assert client.place() is faster
    assert scene.edges.statistics().steps > before
    assert max(np.abs(image.astype(int) - remote.astype(int)).max() for image in images) <= 1


def test_the_services_log_names_the_request(scene: Scene, log_file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lines of a step, those of all that share it, and of an image that cannot be embedded."""
    runner, told = scene.runner, logging.getLogger("plait_serving.test")
    run, embed = runner.try_residuals, runner.constants

    def try_residuals(blocks: Sequence[ControlCall]) -> object:
        told.info("a step")
        return run(blocks)

    def constants(**given: Any) -> object:
        told.info("an image")
        return embed(**given)

    monkeypatch.setattr(runner, "try_residuals", try_residuals)
    monkeypatch.setattr(runner, "constants", constants)
    ended = scene.make(_request("mine.1", "edges"), _request("mine.2", "edges"))
    assert all(isinstance(event, Finished) for event in ended.values())
    assert sorted(line[-9:] for line in log_file.lines("an image")) == [" [mine.1]", " [mine.2]"]
    steps = log_file.lines("a step")
    assert all("mine.1" in line or "mine.2" in line for line in steps)
    assert all(any(name in line for line in steps) for name in ("mine.1", "mine.2"))
    monkeypatch.setattr(runner, "constants", partial(_refuse, "no image"))
    assert isinstance(scene.make(_request("bad.1", "edges"))["bad.1"], Failed)
    (line,) = log_file.lines("could not be opened")
    assert line.endswith(" [bad.1]")


def _refuse(why: str, **_: object) -> None:
    raise ModelError(why)
