"""`plait models random`: the folder's path on stdout, bytes on stderr, and mistakes in one sentence."""

from __future__ import annotations

import json

import pytest
import yaml

from plait.cli.main import main
from plait_serving.diffusion.published import architectures
from plait_serving.diffusion.published.architectures import FamilyName
from support.scaled import scaled_down


@pytest.fixture(autouse=True)
def scaled(monkeypatch, tmp_path):
    """The architectures in small, in a folder of the test's own."""
    monkeypatch.setattr(architectures, "ARCHITECTURES", {family: scaled_down(family) for family in FamilyName})
    monkeypatch.chdir(tmp_path)


def test_a_model_a_controlnet_and_loras_are_listed_as_what_they_are(tmp_path, capsys):
    """What the command wrote is a configuration that `plait models list` reads."""
    commands = (
        ["sdxl", "--out", "base"],
        ["sdxl-controlnet", "--out", "depth", "--dtype", "bfloat16"],
        ["sdxl", "--lora", "peft", "--out", "loras/a.safetensors"],
        ["sdxl", "--lora", "kohya", "--rank", "4", "--seed", "7", "--out", "loras/b.safetensors"],
    )
    for command in commands:
        assert main(["models", "random", *command]) == 0
        said = capsys.readouterr()
        assert said.out == f"{command[-1] if command[-2] == '--out' else 'depth'}\n"
        assert " MB" in said.err
        assert (f"{tmp_path}" in said.err) == (command[0] == "sdxl")  # a ControlNet serves no images by itself
    images = {"model": "./base", "loras": {"folder": "loras"}, "controlnets": {"depth": {"folder": "depth"}}}
    (tmp_path / "plait.yaml").write_text(yaml.safe_dump({"images": images, "recommend": None}))
    assert main(["models", "list", "--config", "plait.yaml", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["kind"], entry["family"], entry["format"]) for entry in entries] == [
        ("base", "sdxl", "diffusers"),
        ("controlnet", "sdxl", "diffusers"),
        ("lora", "sdxl", "peft"),
        ("lora", "sdxl", "kohya"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["sd99", "--out", "x"], 2, "'sd99' is not one of 'sd15', 'sd21'"),
        (["sd15", "--out", "x", "--dtype", "int8"], 2, "'int8' is not one of 'float16'"),
        (["sd15", "--out", "x.safetensors", "--lora", "peft", "--rank", "0"], 2, "must be at least 1"),
        (["sd15", "--out", "x", "--rank", "4"], 2, "--rank: is for --lora only"),
        (["sd15", "--out", "x", "--lora", "kohya"], 2, "--out: x is no .safetensors file"),
        (["sd15-controlnet", "--out", "x.safetensors", "--lora", "kohya"], 2, "not for a ControlNet"),
        (["sd15", "--out", "."], 1, ".: exists and is not an empty folder"),
        (["sd15", "--out", "mine/x"], 1, "mine: File exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence(arguments, code, says, tmp_path, capsys):
    """What is wrong is named, and nothing is written."""
    (tmp_path / "mine").write_text("mine")
    assert main(["models", "random", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert says in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
