"""`plait generate` with the real engine on tiny models: images without a server and without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from plait.cli.main import main
from plait_serving.images.codec import DecodeLimits, decode_image
from plait_serving.images.stored_text import read_parameters
from support.http_app import png
from support.server import write_tiny_models


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A plait.yaml over tiny models."""
    return write_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(config, tmp_path):
    """`make(name, *options)` runs the command and returns the image."""

    def run(name, *options):
        out = tmp_path / name
        arguments = ["red apple", "-o", out, "--config", config, "--seed", 3, "--steps", 3, *options]
        assert main(["generate", *map(str, arguments)]) == 0
        return decode_image(out.read_bytes(), param="p", limits=DecodeLimits()).astype(int)

    return run


def test_seed_lora_and_controlnet_act(make, tmp_path):
    """The same seed gives the same image; a LoRA, a ControlNet and both give three others."""
    control = tmp_path / "map.png"
    control.write_bytes(png(32, 32, (255, 255, 255)))
    plain, again = make("a.png"), make("b.png")
    assert plain.shape == (32, 32, 3)
    assert np.array_equal(plain, again)
    lora, edges = ("--lora", "noto:0.8"), ("--controlnet", f"edges={control}")
    others = [make("c.png", *lora), make("d.png", *edges), make("e.png", *lora, *edges)]
    images = [plain, *others]
    for i, first in enumerate(images):
        for second in images[:i]:
            assert np.abs(first - second).mean() > 0.5
    text = read_parameters((tmp_path / "e.png").read_bytes())
    assert "<lora:noto:0.8>" in text
    assert "Model: edges" in text


def test_only_what_the_order_names_is_loaded_and_run(make, monkeypatch):
    """No warm-up image, no ControlNet that nobody asked for, and no LoRA file opened to list its format."""

    def refuse(*_, **__):
        raise AssertionError("not asked for")

    for name in ("deployments.images.hosted.warm_up", "diffusion.families.unet.family.load_controlnet"):
        monkeypatch.setattr(f"plait_serving.{name}", refuse)
    monkeypatch.setattr("plait_serving.deployments.images.lora_cards.inspect", refuse)
    make("a.png")


def test_a_model_that_memory_cannot_hold_is_one_sentence(config, tmp_path, monkeypatch, capsys):
    """Told before it is loaded, without a traceback; nothing is written."""
    monkeypatch.setattr("plait_serving.diffusion.memory.available_bytes", lambda _: 1000)
    out = tmp_path / "a.png"
    assert main(["generate", "x", "-o", str(out), "--config", str(config)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "needs 0.5" in told
    assert told.endswith("0.00 GB are available")
    assert not out.exists()


COMMAND = """
import sys
from plait.cli.main import main
code = main(sys.argv[1:])
assert "ray" not in sys.modules, "Ray was imported"
sys.exit(code)
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_ctrl_c_in_mid_picture_ends_the_process(config, tmp_path):
    """An interrupt ends a long image: exit code 130, no file, no traceback; and Ray was never imported."""
    out = tmp_path / "a.png"
    process = start("generate", "red apple", "-o", out, "--config", config, "--steps", 200, "-n", 10)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("drawing"):
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert not out.exists()
