"""`plait models verify` over services that draw from the references: figures, table, exit codes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from fakes.images import FAKE_CATALOG, fake_result
from plait.cli.main import main
from plait.offline import images as pictures
from plait_serving.diffusion.errors import EngineStopped
from plait_serving.diffusion.values import Failed, Finished
from plait_serving.starter.manifest import write_manifest
from plait_serving.starter.references import make_references, save_references

COUNT = 30


@pytest.fixture(scope="module")
def artwork():
    """Two styles of 30 concepts as random blocks, ``uint8 (30, 64, 64, 3)`` each."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, COUNT, 16, 16, 3), dtype=np.uint8)
    return blocks.repeat(4, axis=2).repeat(4, axis=3)


@pytest.fixture
def folder(tmp_path, artwork):
    """A folder laid out as the starter's, without weights."""
    for part in ("emoji", "loras", "controlnets/colors"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "controlnets" / "colors" / "config.json").write_text("{}")
    names = tuple(f"concept {i}" for i in range(COUNT))
    save_references(make_references(names, artwork[0], artwork[1]), tmp_path)
    write_manifest(tmp_path)
    return tmp_path


class Painter:
    """Draws a concept's artwork, its other style with a LoRA, and the control image with a ControlNet."""

    def __init__(self, artwork, *, blind=False, dies_after=10**9):
        self.artwork, self.blind, self.dies_after = artwork, blind, dies_after
        self.requests = []

    async def catalog(self):
        model = replace(FAKE_CATALOG.model, default_width=64, default_height=64, default_guidance_scale=3.5)
        return replace(FAKE_CATALOG, models=(model,))

    async def generate(self, request):
        self.requests.append(request)
        if len(self.requests) > self.dies_after:
            yield Failed(error=EngineStopped("died"))
            return
        row = 0 if self.blind else int(request.prompt.removeprefix("concept "))
        image = self.artwork[1 if request.loras and not self.blind else 0][row]
        if request.controlnets and not self.blind:
            image = request.controlnets[0].image
        yield Finished(result=replace(fake_result(request), images=(image,)))


@pytest.fixture
def serve(monkeypatch):
    """`serve(service)` puts a service in place of the engine."""

    def install(service):
        opened = []

        @contextmanager
        def open_local(images):
            opened.append(images)
            yield service

        monkeypatch.setattr(pictures, "open_local", open_local)
        return opened

    return install


def run(folder, *arguments):
    return main(["models", "verify", "--folder", str(folder), *arguments])


def test_a_good_model_passes(folder, artwork, serve, capsys):
    """All figures of the chosen parts hold: exit code 0 and a JSON report."""
    painter = Painter(artwork)
    (opened,) = [serve(painter)]
    parts = ("--part", "recognition", "--part", "colors", "--part", "noto")
    assert run(folder, "--json", *parts) == 0
    report = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert report["passed"] is True
    assert figures["recognition_top1"] == 1.0
    assert figures["colors_error"] < 0.01
    assert (figures["noto_share"], figures["noto_share_without"]) == (1.0, 0.0)
    assert list(opened[0].controlnets) == ["colors"]


def test_every_picture_is_made_at_the_servers_defaults(folder, artwork, serve):
    """Size, guidance and scheduler are the catalog's, steps and seeds the measurement's; no id comes twice at once.
    --quick is a look at 20 concepts."""
    painter = Painter(artwork)
    serve(painter)
    assert run(folder, "--part", "recognition") == 0
    assert {(r.width, r.height, r.guidance_scale, r.steps, r.n) for r in painter.requests} == {(64, 64, 3.5, 20, 1)}
    assert sorted(r.seed for r in painter.requests) == list(range(COUNT))
    assert len({r.request_id for r in painter.requests}) == COUNT
    painter.requests.clear()
    assert run(folder, "--quick", "--part", "recognition") == 0
    assert len(painter.requests) == 20


def test_a_missed_threshold_is_exit_code_99(folder, artwork, serve, capsys):
    """A model that always draws the same image is found out, in a table for people."""
    serve(Painter(artwork, blind=True))
    assert run(folder, "--part", "recognition") == 99
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["figure", "value", "wanted", "images"]
    assert lines[1].split()[0] == "recognition_top1"
    assert lines[1].endswith("MISSED")


def test_an_engine_that_dies_is_exit_code_1(folder, artwork, serve, capsys):
    """The engine's own sentence is told, not a group of exceptions."""
    serve(Painter(artwork, dies_after=5))
    assert run(folder) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "plait models: died"


def test_an_unknown_part_is_wrong_usage(folder, artwork, serve, capsys):
    """The parts that exist are named, before anything is loaded."""
    opened = serve(Painter(artwork))
    assert run(folder, "--part", "beauty") == 2
    assert "recognition" in capsys.readouterr().err
    assert opened == []


def test_a_changed_file_is_refused_before_anything_is_loaded(folder, artwork, serve, capsys):
    """Figures of files that are not the manifest's would mean nothing."""
    opened = serve(Painter(artwork))
    (folder / "controlnets" / "colors" / "config.json").write_text('{"changed": true}')
    assert run(folder) == 1
    assert "controlnets/colors/config.json differs" in capsys.readouterr().err
    assert opened == []
