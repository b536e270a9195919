"""A ControlNet replica dies while images are made: whoever can go on does, and with the same image."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, ControlRows, load_controlnet
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.values import ControlRef, Event, Failed, Finished, ImageRequest, Progress, Scheduler
from support import controlnet as kit
from support.log_file import LogFile, log_file
from support.paused import pause

_SERVICE = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from plait_fabric import listen
from plait_serving.diffusion.families.unet.controlnet import load_controlnet
from plait_serving.diffusion.controlnet.service import ControlNetService
runner = load_controlnet(Path(sys.argv[2]), dtype=torch.float32)
service = ControlNetService("edges", runner, [listen(sys.argv[1], secret=bytes.fromhex(sys.stdin.readline()))])
print(service.addresses[0], flush=True)
sys.stdin.read()
"""
"""A whole ControlNet service in a process of its own, and its address. Takes some seconds to import torch."""

__all__ = ["log_file"]

WAIT_S = 120.0
STEPS = 6


@dataclass(eq=False)
class Scene:
    """An engine whose two ControlNets are services in threads."""

    engine: Engine
    edges: ControlNetService
    runner: ControlNetModelRunner
    fleets: dict[str, kit.ReplicaFleet] = field(default_factory=dict)

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
        fleets = {
            "edges": kit.ReplicaFleet({"thread": edges.addresses[0]}),
            "colors": kit.ReplicaFleet({"thread": colors.addresses[0]}),
        }
        remote = {name: partial(RemoteControlNetClient, name, fleet.connect) for name, fleet in fleets.items()}
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
        yield Scene(engine=engine, edges=edges, runner=runners["edges"], fleets=fleets)


def _request(name: str, *controlnets: str) -> ImageRequest:
    image = np.random.default_rng(0).integers(0, 256, (kit.SIZE, kit.SIZE, 3), dtype=np.uint8)
    return ImageRequest(
        request_id=name,
        prompt="red apple",
        width=kit.SIZE,
        height=kit.SIZE,
        steps=STEPS,
        guidance_scale=5.0,
        seed=7,
        scheduler=Scheduler.EULER,
        controlnets=tuple(ControlRef(name=control, image=image) for control in controlnets),
    )


def _image(event: Event) -> np.ndarray:
    assert isinstance(event, Finished), event
    return event.result.images[0]


def test_picture_survives_a_replica_that_is_killed_in_mid_step(
    scene: Scene, tiny_sd_controlnets: tuple[Path, Path], tmp_path: Path
) -> None:
    """kill -9 while a step is in flight: the step is computed elsewhere and the image is the same, bit for bit."""
    fleet = scene.fleets["edges"]
    service = _SERVICE, kit.new_address("shm", tmp_path), str(tiny_sd_controlnets[0])
    with kit.listening_process(*service) as (process, address):
        fleet.addresses = {"process": address, **fleet.addresses}

        def stop_it(progress: Progress) -> None:
            if progress.step == 3:
                pause(process.pid)  # the next step's question is never answered
                threading.Timer(0.2, process.kill).start()

        undisturbed = _image(scene.make(_request("first", "edges"))["first"])
        assert scene.edges.statistics().steps == 0
        again = _image(scene.make(_request("again", "edges"), on_step=stop_it)["again"])
        assert scene.edges.statistics().steps == STEPS - 3
        plain = _image(scene.make(_request("plain"))["plain"])
    assert np.array_equal(again, undisturbed)
    assert not np.array_equal(plain, undisturbed)


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

    def try_residuals(blocks: Sequence[ControlRows]) -> object:
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
