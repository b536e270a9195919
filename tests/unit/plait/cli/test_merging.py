"""`plait models merge`: the folder on stdout, what was done on stderr, and mistakes in one sentence."""

from __future__ import annotations

import json

import pytest
import yaml

from plait.cli.main import main
from support.tiny import tiny_lora


@pytest.fixture
def config(tiny_sd_folder, tmp_path, monkeypatch):
    """A configuration with a model and a LoRA; the working directory is the test's own."""
    monkeypatch.chdir(tmp_path)
    tiny_lora(tmp_path / "loras" / "ink.safetensors", tiny_sd_folder)
    images = {"models": {"tiny": str(tiny_sd_folder)}, "loras": {"folder": "loras"}}
    (tmp_path / "plait.yaml").write_text(yaml.safe_dump({"images": images, "recommend": None}))
    return "plait.yaml"


@pytest.mark.parametrize(("lora", "by_folder"), [("ink:0.5", False), ("loras/ink.safetensors:0.5", True)])
def test_what_was_written_is_served_as_any_model(lora, by_folder, config, tiny_sd_folder, tmp_path, capsys):
    """By the names of the configuration, or by paths; `plait models list` knows the folder."""
    base = str(tiny_sd_folder) if by_folder else "tiny"
    assert main(["models", "merge", base, "--lora", lora, "--out", "inked", "--config", config]) == 0
    said = capsys.readouterr()
    assert said.out == "inked\n"
    assert "unet: " in said.err
    assert "rounded to float32 (at most 6.0e-08 of each)" in said.err
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({"images": {"models": {"inked": "./inked"}}, "recommend": None}))
    assert main(["models", "list", "--config", "two.yaml", "--json"]) == 0
    assert [entry["family"] for entry in json.loads(capsys.readouterr().out)] == ["sd1"]


def test_names_with_dots_and_of_any_script(config, tiny_sd_folder, tmp_path, capsys):
    """`v1.5` and `v1.6` are two names; a file may be spelled in capitals."""
    for seed, name in enumerate(("v1.5", "v1.6", "花 (b)")):
        tiny_lora(tmp_path / "loras" / f"{name}.safetensors", tiny_sd_folder, seed=seed)
    tiny_lora(tmp_path / "X.SAFETENSORS", tiny_sd_folder, seed=7)
    loras = [part for name in ("v1.5", "v1.6:0.5", "花 (b)", "X.SAFETENSORS") for part in ("--lora", name)]
    assert main(["models", "merge", "tiny", *loras, "--out", "all", "--config", config]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["tiny", "--lora", "ink", "--lora", "ink:2", "--out", "x"], 2, "--lora: names a LoRA twice"),
        (["tiny", "--lora", "ink:much", "--out", "x"], 2, "'much' in 'ink:much' is not a scale"),
        (["tiny", "--lora", "ink", "--lora", "loras/ink.safetensors", "--out", "x"], 1, "two of the LoRAs have one"),
        (["tiny", "--lora", "inc", "--out", "x"], 1, "there is no LoRA named 'inc'; did you mean ink?"),
        (["tiny", "--lora", "no.safetensors", "--out", "x"], 1, "--lora: no.safetensors: there is no such file"),
        (["loras", "--lora", "ink", "--out", "x"], 1, "/loras: no diffusers folder: it has no model_index.json"),
        (["./nosuch", "--lora", "ink", "--out", "x"], 1, "/nosuch: there is no such folder"),
        (["tinny", "--lora", "ink", "--out", "x"], 1, "nor a hub id (owner/name); did you mean tiny?"),
        (["tiny", "--lora", "ink", "--out", "loras"], 1, "loras: exists and is not an empty folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence(arguments, code, says, config, tmp_path, capsys):
    """What is wrong is named, and nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    assert main(["models", "merge", *arguments, "--config", config]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert says in " ".join(said.err.split())
    assert "Traceback" not in said.err
    assert sorted(tmp_path.rglob("*")) == before
