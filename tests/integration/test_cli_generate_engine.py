"""`plait generate` with the real engine on tiny models: images without a server and without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from plait.cli.main import main
from plait_serving.images.codec import decode_image
from support.server import write_tiny_models


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A plait.yaml over tiny models."""
    return write_tiny_models(tmp_path_factory.mktemp("tiny"))


def test_only_what_the_order_names_is_loaded_and_run(config, tmp_path, monkeypatch):
    """No warm-up image, no ControlNet that nobody asked for, and no LoRA file opened to list its format."""

    def refuse(*_, **__):
        raise AssertionError("not asked for")

    for name in ("deployments.images.hosted.warm_up", "diffusion.families.unet.family.load_controlnet"):
        monkeypatch.setattr(f"plait_serving.{name}", refuse)
    monkeypatch.setattr("plait_serving.deployments.images.lora_cards.inspect", refuse)
    out = tmp_path / "a.png"
    assert main(["generate", "red apple", "-o", str(out), "--config", str(config), "--steps", "3"]) == 0
    assert decode_image(out.read_bytes(), param="p").shape == (32, 32, 3)


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
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert not out.exists()
