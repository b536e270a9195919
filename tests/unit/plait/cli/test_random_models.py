"""`plait models random`: the folder's path on stdout, bytes on stderr, and mistakes in one sentence."""

from __future__ import annotations

import json

import pytest
import yaml

from plait.cli.main import main
from plait_serving.diffusion.families.flow import single_file
from plait_serving.diffusion.published import architectures
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from support.original_flow import write_flow_file


@pytest.fixture(autouse=True)
def scaled(monkeypatch, tmp_path):
    """The architectures in small, in a folder of the test's own."""
    small = {family: scaled_down(family) for family in FamilyName}
    monkeypatch.setattr(architectures, "ARCHITECTURES", small)
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


def test_a_transformer_and_its_loras_are_listed_as_what_they_are(tmp_path, capsys, monkeypatch):
    """As for the others: what training scripts write for it is known by its names; and they are merged, also into a
    file that is the transformer alone."""
    assert main(["models", "random", "flux.1-schnell", "--out", "base"]) == 0
    for layout in ("peft", "kohya"):
        out = f"loras/{layout}.safetensors"
        assert main(["models", "random", "flux.1-schnell", "--lora", layout, "--rank", "2", "--out", out]) == 0
    images = {"model": "./base", "loras": {"folder": "loras"}}
    (tmp_path / "plait.yaml").write_text(yaml.safe_dump({"images": images, "recommend": None}))
    capsys.readouterr()
    assert main(["models", "list", "--config", "plait.yaml", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [(entry["kind"], entry["family"], entry["format"]) for entry in entries] == [
        ("base", "flux1", "diffusers"),
        ("lora", "flux1", "kohya"),
        ("lora", "flux1", "peft"),
    ]
    loras = ("--lora", "peft", "--lora", "kohya:0.5")
    assert main(["models", "merge", "base", *loras, "--config", "plait.yaml", "--out", "merged"]) == 0
    assert "transformer: " in capsys.readouterr().err
    monkeypatch.setattr(single_file, "ARCHITECTURES", architectures.ARCHITECTURES)
    write_flow_file(tmp_path / "base", tmp_path / "alone.safetensors")
    images = {"models": {"alone": {"file": "./alone.safetensors", "config": "./base"}}, "loras": {"folder": "loras"}}
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump({"images": images, "recommend": None}))
    assert main(["models", "merge", "alone", *loras, "--config", "alone.yaml", "--out", "of-alone"]) == 0
    parts = [tmp_path / each / "transformer/diffusion_pytorch_model.safetensors" for each in ("merged", "of-alone")]
    assert parts[0].read_bytes() == parts[1].read_bytes()


def test_a_tiny_model_has_the_published_parts(tmp_path, capsys):
    """`--tiny` is the same pipeline in a few megabytes, and `--no-t5` leaves out what may be left out."""
    assert main(["models", "random", "sd3.5-medium", "--tiny", "--no-t5", "--out", "small"]) == 0
    assert capsys.readouterr().out == "small\n"
    parts = sorted(path.name for path in (tmp_path / "small").iterdir() if path.is_dir())
    assert parts == ["scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae"]
    assert sum(path.stat().st_size for path in (tmp_path / "small").rglob("*")) < 20_000_000


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["sd99", "--out", "x"], 2, "'sd99' is not one of 'sd15', 'sd21'"),
        (["sd15", "--out", "x.safetensors", "--lora", "peft", "--rank", "0"], 2, "must be at least 1"),
        (["sd15", "--out", "x", "--rank", "4"], 2, "--rank: is for --lora only"),
        (["sd15", "--out", "x", "--lora", "kohya"], 2, "--out: x is no .safetensors file"),
        (["sd15-controlnet", "--out", "x.safetensors", "--lora", "kohya"], 2, "not for a ControlNet"),
        (["flux.1-dev", "--no-t5", "--out", "x"], 1, "FluxPipeline cannot do without its T5"),
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
