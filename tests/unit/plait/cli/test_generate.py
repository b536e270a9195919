"""`plait generate` over the fake service: options to request, files, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakes.images import FakeImageService, fake_image
from plait.cli import generate as command
from plait.cli.main import main
from plait_serving.diffusion.errors import NumericalError
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.diffusion.values import LoraRef, Scheduler
from plait_serving.images.codec import decode_image
from plait_serving.images.config import STARTER_FOLDER
from plait_serving.images.infotext import read_parameters
from support.http_app import png


@pytest.fixture
def service(monkeypatch):
    """The fake service in place of an engine; remembers that it was closed."""
    fake = FakeImageService(failures={"nan": NumericalError("NaN in image 0")})
    fake.closed = 0

    @contextmanager
    def open_service(images):
        fake.opened_with = images
        try:
            yield fake
        finally:
            fake.closed += 1

    monkeypatch.setattr(command, "open_service", open_service)
    return fake


def run(*arguments):
    return main(["generate", *map(str, arguments)])


def image(path):
    return decode_image(Path(path).read_bytes(), param="p")


def test_an_edit_starts_from_a_file(service, tmp_path):
    """--image, --mask and --strength reach the request; the output has the image's size."""
    source, mask, out = tmp_path / "source.png", tmp_path / "mask.png", tmp_path / "a.png"
    source.write_bytes(png(24, 16))
    mask.write_bytes(png(24, 16, (255, 255, 255)))
    assert run("red apple", "-o", out, "--image", source, "--mask", mask, "--strength", 0.5) == 0
    (request,) = service.submitted
    assert (request.width, request.height, request.edit.strength) == (24, 16, 0.5)
    assert np.array_equal(request.edit.image, image(source))
    assert request.edit.mask.min() == 255
    assert np.array_equal(image(out), fake_image(request, request.seed))
    assert "Denoising strength: 0.5" in read_parameters(out.read_bytes())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image", "SOURCE", "--strength", "0"), "--strength: must be greater than 0"),
        (("--image", "SOURCE", "--mask", "OTHER"), "--mask: the mask is 8x8, the image 24x16"),
        (("--image", "TEXT"), "--image: not a readable PNG, JPEG or WebP image"),
    ],
)
def test_a_wrong_edit_names_its_option(service, tmp_path, capsys, options, message):
    """Usage errors exit with 2 and say which option to change; nothing is written."""
    files = {"SOURCE": png(24, 16), "OTHER": png(8, 8), "TEXT": b"text"}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    out = tmp_path / "a.png"
    assert run("red apple", "-o", out, *(tmp_path / one if one in files else one for one in options)) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_one_picture_with_the_defaults(service, tmp_path, capsys):
    """The file holds the image and its parameters; its name is all that stdout gets."""
    out = tmp_path / "a.png"
    assert run("red apple", "-o", out) == 0
    (request,) = service.submitted
    assert np.array_equal(image(out), fake_image(request, request.seed))
    assert read_parameters(out.read_bytes()).startswith("red apple\nSteps: 4, Sampler: Euler")
    assert capsys.readouterr().out == f"{out}\n"
    assert service.closed == 1


def test_every_option_reaches_the_request(service, tmp_path):
    """LoRAs, ControlNets, preprocessing and numbers arrive as they were typed."""
    control, config = tmp_path / "odd=name:1.png", tmp_path / "plait.yaml"
    control.write_bytes(png(16, 16, (9, 9, 9)))
    folder = {"folder": str(STARTER_FOLDER / "controlnets" / "edges")}
    config.write_text(json.dumps({"images": {"controlnets": {"plain": folder, "edges": folder}}}))
    code = run(
        "red apple", "-o", tmp_path / "a.webp", "--config", config, "--lora", "noto:0.8", "--lora", "sketch",
        "--negative", "blue",
        "--controlnet", f"plain:0.5={control}", "--controlnet", f"edges={control}", "--seed", 7, "--steps", 3,
        "--guidance", 2.5, "--scheduler", "lcm", "-n", 2, "--size", "16x24", "--true-cfg-scale", 3,
        "--max-sequence-length", 128,
    )  # fmt: skip
    assert code == 0
    (request,) = service.submitted
    assert request.loras == (LoraRef(name="noto", scale=0.8), LoraRef(name="sketch", scale=1.0))
    assert [(c.name, c.scale) for c in request.controlnets] == [("plain", 0.5), ("edges", 1.0)]
    assert (request.controlnets[0].image == 9).all()
    assert (request.seed, request.steps, request.guidance_scale, request.n) == (7, 3, 2.5, 2)
    assert (request.scheduler, request.width, request.height) == (Scheduler.LCM, 16, 24)
    assert (request.negative_prompt, request.true_cfg_scale, request.max_sequence_length) == ("blue", 3.0, 128)
    assert sorted(path.name for path in tmp_path.glob("*.webp")) == ["a-1.webp", "a-2.webp"]


def test_json_tells_files_seeds_and_timings(service, tmp_path, capsys):
    """A program can read what was made."""
    assert run("x", "-o", tmp_path / "a.jpg", "-n", 2, "--seed", 5, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(it["file"], it["seed"]) for it in told["pictures"]] == [(f"{tmp_path}/a-{n}.jpg", 4 + n) for n in (1, 2)]
    assert told["timings"]["total"] == 1.9375
    assert (told["model"], told["size"]) == ("emoji", "16x16")


@pytest.mark.parametrize(
    ("option", "values"),
    [("--true-cfg-scale", [7]), ("--max-sequence-length", [7]), ("--lora", ["noto", "noto"]), ("--steps", [51])],
)
def test_what_the_model_does_not_take_is_refused_by_its_option(service, tmp_path, capsys, option, values):
    """As over HTTP by its field."""
    (emoji,) = service.offers.models
    service.offers = replace(service.offers, models=(replace(emoji, terms=RequestTerms()),))
    assert run("x", "-o", tmp_path / "a.png", *(part for value in values for part in (option, value))) == 2
    assert f"plait generate: {option}: " in capsys.readouterr().err
    assert service.submitted == []


def test_a_failure_is_exit_code_1(service, tmp_path, capsys):
    """An error of the engine is one sentence on stderr; the engine is stopped and no file appears."""
    assert run("nan", "-o", tmp_path / "a.png") == 1
    assert "Traceback" not in capsys.readouterr().err
    assert service.closed == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_can_not_be_written_is_told_by_its_name(service, tmp_path, capsys):
    """A folder in its way; a full disk, whose error has no name."""
    (tmp_path / "b.png").mkdir()
    assert run("x", "-o", tmp_path / "b.png") == 2
    assert f"--output: {tmp_path / 'b.png'}: Is a directory" in capsys.readouterr().err
    (tmp_path / "a.png").symlink_to("/dev/full")
    assert run("x", "-o", tmp_path / "a.png") == 2
    assert f"--output: {tmp_path / 'a.png'}: No space left on device" in capsys.readouterr().err


def test_a_name_of_the_configuration_comes_before_a_folder(service, tmp_path, monkeypatch):
    """Of what lies in the working directory only that is meant which no model is called; nothing is then left of what
    the configuration says of its own models."""
    for name in ("first", "second", "\U0001f600"):
        shutil.copytree(STARTER_FOLDER / "emoji", tmp_path / name)
    (tmp_path / "emoji").mkdir()
    monkeypatch.chdir(tmp_path)
    commit = "0" * 40
    named = {"models": {"first": "./first", "emoji": "emoji"}, "aliases": {"quick": "first"}, "controlnets": {}}
    hub = {"model": "owner/name", "revision": commit, "name": "named", "controlnets": {}}
    for images, model, opened in (
        (named, "emoji", {"first": str(tmp_path / "first"), "emoji": "emoji"}),
        (named, "second", {"second": str(tmp_path / "second")}),
        (hub, "./second", {"second": str(tmp_path / "second")}),
        (hub, "\U0001f600", {"\U0001f600": str(tmp_path / "\U0001f600")}),
    ):
        Path("plait.yaml").write_text(json.dumps({"images": images}))
        assert run("x", "-o", "a.png", "--config", "plait.yaml", "--model", model) == 0
        assert {name: base.model for name, base in service.opened_with.base_models.items()} == opened
