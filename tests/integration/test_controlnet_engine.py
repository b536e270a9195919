"""An engine whose ControlNets are services: where they run, and what their logs say."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
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
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.protocols import ControlCall
from plait_serving.diffusion.values import ControlRef, Event, Failed, Finished, ImageRequest, Scheduler
from support import controlnet as kit
from support.denoise import control_image, make_request
from support.engine import Watch
from support.fabric import Replicas, new_address
from support.log_file import LogFile, log_file

__all__ = ["log_file"]


@dataclass(eq=False)
class Scene:
    """An engine whose ControlNet is a service in threads."""

    engine: Engine
    edges: ControlNetService
    runner: ControlNetModelRunner

    def make(self, *requests: ImageRequest) -> dict[str, Event]:
        """Runs all at once; how each ended."""
        watches = {request.request_id: Watch(self.engine, request) for request in requests}
        return {name: watch.end() for name, watch in watches.items()}


@pytest.fixture
def scene(tiny_sd_folder: Path, tiny_sd_controlnets: tuple[Path, Path], tmp_path: Path) -> Iterator[Scene]:
    """A fresh engine with one replica of its ControlNet."""
    folder = tiny_sd_controlnets[0]
    runner = load_controlnet(folder, dtype=torch.float32)
    with kit.serving(runner, new_address("tcp", tmp_path)) as edges:
        fleet = Replicas({"thread": edges.addresses[0]}, secret=kit.SECRET, timeout_s=60)
        remote = {"edges": partial(RemoteControlNetClient, "edges", fleet.connect)}
        settings = EngineSettings(
            model=tiny_sd_folder,
            dtype="float32",
            device="cpu",
            controlnets={"edges": folder},
            converts=False,
            knobs=EngineKnobs(threads=1, controlnet_placement=Placement.REMOTE),
        )
        engine = build_engine(settings, remote=remote, costs=EveryBatchPays())
        yield Scene(engine=engine, edges=edges, runner=runner)
        engine.stop(drain_s=0.0)


def _request(name: str) -> ImageRequest:
    controls = (ControlRef(name="edges", image=control_image(0, kit.SIZE)),)
    return make_request(request_id=name, steps=6, scheduler=Scheduler.EULER, controlnets=controls)


def _image(event: Event) -> np.ndarray:
    assert isinstance(event, Finished), event
    return event.result.images[0]


def test_automatic_placement_runs_both_places_and_takes_the_faster(scene: Scene) -> None:
    """It is settled by steps of users, and the image is the same wherever it was made."""
    engine, client = scene.engine, scene.engine.pool.first.controlnets["edges"]
    before, images = scene.edges.statistics().steps, []
    remote = _image(scene.make(_request("remote"))["remote"])
    engine.reconfigure(engine.knobs.model_copy(update={"controlnet_placement": Placement.AUTO}))
    while client.times is None or not images:
        assert len(images) < 8
        images.append(_image(scene.make(_request(str(len(images))))[str(len(images))]))
    assert min(client.times.local_s, client.times.remote_s) > 0.0
    faster = Placement.REMOTE if client.times.remote_s < client.times.local_s else Placement.LOCAL
    assert client.place() is faster
    assert scene.edges.statistics().steps > before
    assert max(np.abs(image.astype(int) - remote.astype(int)).max() for image in images) <= 1


def test_the_services_log_names_the_request(scene: Scene, log_file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lines of a step, those of all that share it, and of an image that cannot be embedded."""
    runner, told = scene.runner, logging.getLogger("plait_serving.test")
    run, embed = runner.try_residuals, runner.open

    def try_residuals(blocks: Sequence[ControlCall]) -> object:
        told.info("a step")
        return run(blocks)

    def open_session(**given: Any) -> object:
        told.info("an image")
        return embed(**given)

    monkeypatch.setattr(runner, "try_residuals", try_residuals)
    monkeypatch.setattr(runner, "open", open_session)
    ended = scene.make(_request("mine.1"), _request("mine.2"))
    assert all(isinstance(event, Finished) for event in ended.values())
    assert sorted(line[-9:] for line in log_file.lines("an image")) == [" [mine.1]", " [mine.2]"]
    steps = log_file.lines("a step")
    assert all("mine.1" in line or "mine.2" in line for line in steps)
    assert all(any(name in line for line in steps) for name in ("mine.1", "mine.2"))
    monkeypatch.setattr(runner, "open", partial(_refuse, "no image"))
    assert isinstance(scene.make(_request("bad.1"))["bad.1"], Failed)
    (line,) = log_file.lines("could not be opened")
    assert line.endswith(" [bad.1]")


def _refuse(why: str, **_: object) -> None:
    raise ModelError(why)
