"""`plait models list`: names, kinds, families and formats, read from folders without loading weights; `check`; and
`explain`, whose exit code says that something keeps a model from being cut (guides show the other one)."""

from __future__ import annotations

import json
import struct

import pytest
import yaml

from plait.cli.main import main
from plait.offline.inventory import tensors_of
from support.tensor_headers import write_header


def write_safetensors(path, names):
    write_header(path, dict.fromkeys(names, 4))


@pytest.fixture
def config(tmp_path):
    """A plait.yaml with a base, a ControlNet, two LoRAs and a recommender, all of them only headers."""
    (tmp_path / "base" / "unet").mkdir(parents=True)
    (tmp_path / "base" / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    (tmp_path / "base" / "unet" / "config.json").write_text('{"addition_embed_type": "text_time"}')
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "config.json").write_text('{"cross_attention_dim": 1024}')
    write_safetensors(tmp_path / "loras" / "b.safetensors", ["lora_unet_x.lora_down.weight"])
    write_safetensors(tmp_path / "loras" / "a.safetensors", ["unet.x.lora_A.weight"])
    (tmp_path / "loras" / "pickled.ckpt").write_bytes(b"no")
    images = {"model": "./base", "loras": {"folder": "loras"}, "controlnets": {"depth": {"folder": "depth"}}}
    path = tmp_path / "plait.yaml"
    (tmp_path / "ranker").mkdir()
    (tmp_path / "ranker" / "package.json").write_text('{"format": 1}')
    path.write_text(yaml.safe_dump({"images": images, "recommend": {"models": {"films": {"folder": "ranker"}}}}))
    return path


def test_the_list_names_every_model_with_its_family_and_format(config, tmp_path, capsys):
    """Base, ControlNets, LoRAs and recommenders, each with where it lies."""
    assert main(["models", "list", "--json", "--config", str(config)]) == 0
    expected = [
        ("base", "base", "sdxl", "diffusers", tmp_path / "base"),
        ("depth", "controlnet", "sd2", "diffusers", tmp_path / "depth"),
        ("a", "lora", "sdxl", "peft", tmp_path / "loras/a.safetensors"),
        ("b", "lora", "sdxl", "kohya", tmp_path / "loras/b.safetensors"),
        ("films", "recommender", "graph", "package 1", tmp_path / "ranker"),
    ]
    heading = ("name", "kind", "family", "format", "folder")
    listed = json.loads(capsys.readouterr().out)
    assert listed == [dict(zip(heading, (*facts, str(folder)), strict=True)) for *facts, folder in expected]


def test_the_table_prints_no_path_as_it_is(config, tmp_path, capsys):
    """One line per model under a heading; a folder may be called in bytes that are no text, or in a terminal's
    language."""
    write_safetensors(tmp_path / "loras" / "\x1b[31m\udcff" / "z.safetensors", ["unet.x.lora_A.weight"])
    assert main(["models", "list", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "kind", "family", "format", "folder"]
    assert [line.split()[0] for line in lines[1:]] == ["base", "depth", "a", "b", "z", "films"]
    assert r"/loras/\x1b[31m\udcff/z.safetensors" in lines[5]


def test_what_lies_in_a_folder_of_models_is_listed_in_order(config, tmp_path, capsys):
    """After the configuration's own, by name; a broken one is called that, and keeps no other from being listed."""
    for name in ("d", "b", "a", "c"):
        (tmp_path / "more" / name / "unet").mkdir(parents=True)
        (tmp_path / "more" / name / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
        (tmp_path / "more" / name / "unet" / "config.json").write_text("{" if name == "b" else "{}")
    settings = yaml.safe_load(config.read_text())
    settings["images"]["models_folder"] = "more"
    config.write_text(yaml.safe_dump(settings))
    assert main(["models", "list", "--json", "--config", str(config)]) == 0
    bases = [it for it in json.loads(capsys.readouterr().out) if it["kind"] == "base"]
    assert [(it["name"], it["format"]) for it in bases] == [
        ("base", "diffusers"), ("a", "diffusers"), ("b", "unreadable"), ("c", "diffusers"), ("d", "diffusers"),
    ]  # fmt: skip


def test_a_missing_folder_is_one_sentence(tmp_path, capsys):
    """A base or a package that is not there is named; exit code 1."""
    path = tmp_path / "plait.yaml"
    for text in ("images: {model: ./nowhere}", "{images: null, recommend: {models: {a: {folder: nowhere}}}}"):
        path.write_text(text)
        assert main(["models", "list", "--config", str(path)]) == 1
        assert "nowhere" in capsys.readouterr().err


def test_hub_ids_and_stores_are_listed_as_such(tmp_path, capsys):
    """What is not on this machine is named by where it comes from; nothing is downloaded."""
    commit = "0123456789abcdef" * 2 + "01234567"
    store = {"url": "s3://bucket/loras", "cache_folder": "cache"}
    store["entries"] = {"x": {"path": "x-v2.safetensors", "sha256": "0" * 64, "nbytes": 5}}
    images = {"model": "owner/name", "revision": commit, "loras": {"store": store}}
    path = tmp_path / "plait.yaml"
    path.write_text(yaml.safe_dump({"images": images, "recommend": None}))
    assert main(["models", "list", "--json", "--config", str(path)]) == 0
    base, lora = json.loads(capsys.readouterr().out)
    assert (base["name"], base["folder"]) == ("name", f"owner/name@{commit}")
    assert lora["folder"] == "s3://bucket/loras/x-v2.safetensors"


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x00", b"\xff" * 8, struct.pack("<Q", 2**62), struct.pack("<Q", 5) + b"{", struct.pack("<Q", 2) + b"[]",
     struct.pack("<Q", 3) + b"\xff\xfe\xfd", b"PK\x03\x04" + bytes(20), struct.pack("<Q", 10**6) + b"[" * 10**6],
)  # fmt: skip
def test_a_file_that_is_no_safetensors_has_no_tensors(tmp_path, raw):
    """A broken or foreign file in the folder is listed as unknown instead of breaking the list."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    assert tensors_of(path) == {}


def test_all_base_models_are_listed_by_their_names(config, tmp_path, capsys):
    """Families are mixed, and of checkpoints in one file known by the names of their tensors; of a LoRA it is then not
    known which one it is for."""
    parts = ("model.diffusion_model.x", "first_stage_model.x", "conditioner.embedders.1.x")
    write_safetensors(tmp_path / "xl.safetensors", parts)
    write_safetensors(tmp_path / "no.safetensors", parts[:1])
    models = {"large": "./base", "no": "./no.safetensors", "starter": "emoji", "xl": "./xl.safetensors"}
    images = {"models": models, "loras": {"folder": "loras"}, "controlnets": {}}
    config.write_text(yaml.safe_dump({"images": images, "recommend": None}))
    assert main(["models", "list", "--json", "--config", str(config)]) == 0
    assert [(it["name"], it["family"], it["format"]) for it in json.loads(capsys.readouterr().out)] == [
        ("large", "sdxl", "diffusers"), ("no", "unknown", "single file"), ("starter", "sd1", "diffusers"),
        ("xl", "sdxl", "single file"), ("a", "unknown", "peft"), ("b", "unknown", "kohya"),
    ]  # fmt: skip


def test_a_model_is_checked_and_the_exit_code_tells(tmp_path, capsys):
    """0 for a whole one, 1 for one with a problem or for none; a program can read what was found."""
    assert main(["models", "check", "emoji", "--json"]) == 0
    assert {each["verdict"] for each in json.loads(capsys.readouterr().out)} == {"ok"}
    (tmp_path / "model_index.json").write_text("{}")
    assert main(["models", "check", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("fail  models    ")
    assert main(["models", "check", "emjoi"]) == 1
    sentence = "emjoi: no model of that name, no folder and no file; did you mean emoji?"
    assert sentence in capsys.readouterr().err


SOURCE = """
import torch
from torch import nn
from plait_disagg.graph.inputs import Dense

class Model(nn.Module):
    def forward(self, x, y):
        return (x - x.mean(dim=0)).sum(1) + y.cumsum(dim=0).sum(1)

def build():
    return Model().eval(), [Dense("x", shape=(3,)), Dense("y", shape=(3,))]
"""


def test_all_obstacles_are_listed_with_their_lines(tmp_path, monkeypatch, capsys):
    """Both are listed, though the first would already refuse the model."""
    (tmp_path / "model.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["models", "explain", "model.py:build"]) == 1
    said = capsys.readouterr().out
    assert all(text in said for text in ("1. aten.mean.dim", "2. aten.cumsum", "model.py:8"))
