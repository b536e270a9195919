"""Folders of models: what is changed, missing or pickled is named before anything is loaded."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from plait.config import load_config
from plait.doctor import models
from plait.doctor.findings import CheckStatus
from plait.offline.inventory import inventory
from plait_serving.diffusion.errors import ModelError
from plait_serving.ranking.config import STARTER_RANKING_FOLDER
from plait_serving.starter.manifest import WEIGHTS
from support.families import opened


@pytest.fixture
def config(tmp_path):
    """A configuration whose models are copies of the starter's; no weights are loaded here."""
    shutil.copytree(WEIGHTS / "emoji", tmp_path / "base")
    shutil.copytree(WEIGHTS / "loras", tmp_path / "loras")
    shutil.copytree(STARTER_RANKING_FOLDER, tmp_path / "picks")
    path = tmp_path / "plait.yaml"
    path.write_text(
        "images: {model: ./base, loras: {folder: loras}, controlnets: {}}\n"
        "recommend: {models: {picks: {folder: picks}}}\n"
    )
    return path


def problems(path):
    return [it for it in models.check_models(load_config(path)) if it.verdict is not CheckStatus.OK]


def test_a_model_that_cannot_be_read_is_told(config):
    """As the server that leaves it out says it: damaged; nested without an end; and copied without what its links lead
    to, as `cp -r` does it with a folder in the hub's cache, where `ls` shows the file."""
    base = config.parent / "base"
    path, index = base / "unet" / "config.json", base / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "down_block_types": 5}))
    (problem,) = problems(config)
    assert f"{base}: its configuration is damaged: TypeError(" in problem.detail
    index.write_text("[" * 100_000)
    (problem,) = problems(config)
    assert f"{index}: not readable: maximum recursion depth" in problem.detail
    index.unlink()
    index.symlink_to("../../blobs/1")
    (problem,) = problems(config)
    assert "its model_index.json is a link that leads nowhere" in problem.detail


def test_cli_doctor_looks_at_every_lora_that_is_served(config):
    """Also in sub-folders, and with a suffix in capitals; a folder may be called in bytes that are no text, or in a
    terminal's language, which is not printed as it is."""
    loras = config.parent / "loras"
    odd = "\x1b[31m\udcff"
    for name in ("deep/花", odd):
        (loras / name).mkdir(parents=True)
    shutil.copy(loras / "noto.safetensors", loras / "deep" / "ok.SAFETENSORS")
    assert problems(config) == []
    for name in ("NOISE.SAFETENSORS", f"{odd}/noise.safetensors", "deep/花/pytorch_lora_weights.safetensors"):
        (loras / name).write_bytes(b"noise")
    (found,) = problems(config)
    said = found.detail.partition(" in ")[0].split(", ")
    assert set(said) == {
        "NOISE.SAFETENSORS", r"\x1b[31m\udcff/noise.safetensors", "deep/花/pytorch_lora_weights.safetensors"
    }  # fmt: skip


def test_cli_doctor_finds_harmed_packages(config):
    """The sums in package.json are compared, and what it lists must be what a worker opens."""
    file, listed = config.parent / "picks" / "cn.json", config.parent / "picks" / "package.json"
    whole = file.read_text()
    file.write_text(f"{whole} ")
    assert ["cn.json" in found.detail for found in problems(config)] == [True]
    file.write_text(whole)
    manifest = json.loads(listed.read_text())
    del manifest["files"]["hn.json"]
    listed.write_text(json.dumps(manifest))
    assert ["hn.json" in found.detail for found in problems(config)] == [True]


def test_cli_doctor_checks_checkpoints_in_one_file(config):
    """By the names of their tensors; a LoRA is none, and one that is not there is said to be."""
    save_file(
        {f"{part}.x": np.zeros(1) for part in ("model.diffusion_model", "first_stage_model", "cond_stage_model.model")},
        config.parent / "sd21.safetensors",
    )
    names = {"a": "./sd21.safetensors", "b": "./loras/noto.safetensors", "c": "./gone.safetensors"}
    config.write_text(f"images: {{models: {json.dumps(names)}}}\nrecommend: null\n")
    here = config.parent
    assert {it.detail for it in problems(config)} == {
        f"images.models.b: {here / 'loras/noto.safetensors'}: a LoRA; those belong into images.loras.folder",
        f"images.models.c: {here / 'gone.safetensors'}: there is no such file",
    }


def test_cli_doctor_says_what_is_left_out(config):
    """Of the LoRAs and of the folder of models, each with its reason; and a LoRA that only an alias knows."""
    here = config.parent
    (here / "loras" / "old.ckpt").write_bytes(b"")
    shutil.copytree(here / "base", here / "more" / "a")
    (here / "more" / "again").symlink_to("a")
    (here / "more" / "mine").symlink_to(here / "base")
    (here / "more" / "empty").mkdir()
    config.write_text(
        "images: {model: ./base, loras: {folder: loras}, models_folder: more, controlnets: {},"
        " aliases: {x: {model: base, loras: {notto: 1}}}}\nrecommend: null\n"
    )
    found = problems(config)
    assert {it.verdict for it in found} == {CheckStatus.WARN}
    assert {it.detail for it in found} == {
        f"again and a are both {here / 'more/a'}",
        "images.aliases.x.loras: there is no LoRA 'notto'; did you mean noto?",
        f"not served of {here / 'loras'}: old.ckpt (only .safetensors files are read)",
        f"not served of {here / 'more'}: empty (no diffusers folder: it has no model_index.json); "
        "mine (a link that leads out of the folder)",
    }


def test_models_are_listed_once(config):
    """A link in the folder of models is no other model, nor is what the configuration names."""
    more = config.parent / "more"
    shutil.copytree(config.parent / "base", more / "a")
    (more / "again").symlink_to("a")
    config.write_text("images: {models: {first: ./more/a}, models_folder: more, controlnets: {}}\nrecommend: null\n")
    assert [(it.name, it.kind) for it in inventory(load_config(config).images)] == [("first", "base")]
    config.write_text("images: {model: ./base, models_folder: more, controlnets: {}}\nrecommend: null\n")
    assert [it.name for it in inventory(load_config(config).images)] == ["base", "a"]


@pytest.mark.parametrize(("memory_gb", "verdict"), [(1.0, CheckStatus.OK), (0.000001, CheckStatus.FAIL)])
def test_shards_must_hold_the_tables(config, memory_gb, verdict):
    """What each shard would hold is said, and tables that do not fit are a failure that names what to change."""
    dealt = f"cn: {{shards: {{count: 2, memory_gb: {memory_gb}}}}}"
    config.write_text(config.read_text().replace("folder: picks", f"folder: picks, {dealt}"))
    (found,) = [it for it in models.check_models(load_config(config)) if it.name == "shards"]
    assert found.verdict is verdict
    assert ("2 shards" if verdict is CheckStatus.OK else "do not fit into 2 shards") in found.detail


def test_one_model_is_checked_by_name_or_by_path(config):
    """Each kind: a base model, also in the folder of models, a LoRA, a ControlNet and a package."""
    here = config.parent
    shutil.copytree(WEIGHTS / "controlnets" / "edges", here / "edges")
    shutil.copytree(here / "base", here / "more" / "mine")
    (here / "saved").mkdir()
    shutil.copy(here / "loras" / "noto.safetensors", here / "saved" / "pytorch_lora_weights.safetensors")
    hub = f"owner/name@{'0' * 40}"
    config.write_text(
        f"images: {{models: {{base: ./base, hub: {hub}}}, models_folder: more, loras: {{folder: loras}}}}\n"
        "recommend: {models: {picks: {folder: picks}}}\n"
    )
    for asked, says in (
        ("base", "unet: safetensors"), ("noto", "noto.safetensors: a LoRA, "), ("mine", "more/mine/unet: safetensors"),
        ("picks", f"picks: {here}/picks, intact"), ("hub", "hub: checked when it is fetched"),
        (f"{here}/base", "unet: safetensors"), (f"{here}/picks", "picks, intact"),
        (f"{here}/loras/noto.safetensors", "noto.safetensors: a LoRA, "), (f"{here}/edges", "edges: safetensors"),
        (f"{here}/saved", "pytorch_lora_weights.safetensors: a LoRA, "),
    ):  # fmt: skip
        found = list(models.check_model(load_config(config), asked))
        assert {it.verdict for it in found} == {CheckStatus.OK}
        assert any(says in it.detail for it in found), asked


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("base/unet/config.json", ["base/unet/config.json: missing"] * 2),
        ("base/scheduler", ["base/scheduler: there is no such folder"] * 2),
        ("picks/package.json", ["picks is no packaged model", "no diffusers folder"]),
        ("picks/cn.json", ["cn.json missing or changed"] * 2),
    ],
)
def test_one_harmed_model_is_a_problem(config, harm, says):
    """As `plait doctor` says it, by name, and by path if that still tells what it was."""
    here = config.parent
    shutil.rmtree(here / harm) if (here / harm).is_dir() else (here / harm).unlink()
    name = harm.partition("/")[0]
    for asked, expected in zip((name, str(here / name)), says, strict=True):
        found = [it for it in models.check_model(load_config(config), asked) if it.verdict is CheckStatus.FAIL]
        assert found
        assert expected in found[0].detail


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("model_index.json", {"requires_aesthetics_score": True}, "an SDXL refiner is not supported as a base model"),
        ("unet/config.json", {"cross_attention_dim": 99}, "cross_attention_dim is 99, the text is "),
        ("scheduler/scheduler_config.json", {"prediction_type": "flow"}, "prediction_type = 'flow' is not supported"),
    ],
)
def test_what_the_engine_refuses_is_a_problem(config, file, changes, says):
    """By the engine's own sentence: what is called well here is loaded."""
    path = config.parent / "base" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError) as refused:
        opened(config.parent / "base")
    assert says in refused.value.message
    (found,) = problems(config)
    assert (found.verdict, found.detail) == (CheckStatus.FAIL, f"images.model: {refused.value.message}")
    *_, last = models.check_model(load_config(config), "base")
    assert (last.verdict, last.detail) == (CheckStatus.FAIL, f"base: {refused.value.message}")
    *_, last = models.check_model(load_config(config), folder := str(config.parent / "base"))
    assert (last.verdict, last.detail.count(folder)) == (CheckStatus.FAIL, 1)
    assert last.detail.endswith(refused.value.message)


def test_a_controlnet_that_the_engine_refuses_is_a_problem(config):
    """By its configuration: before anything is started."""
    net = config.parent / "edges"
    shutil.copytree(WEIGHTS / "controlnets" / "edges", net)
    settings = json.loads((net / "config.json").read_text())
    (net / "config.json").write_text(json.dumps({**settings, "global_pool_conditions": True}))
    config.write_text("images: {controlnets: {a: {folder: edges}}}\nrecommend: null\n")
    for found in (models.check_folders(load_config(config)), models.check_model(load_config(config), "a")):
        (problem,) = [it for it in found if it.verdict is not CheckStatus.OK]
        assert "global_pool_conditions (guess mode) is not supported" in problem.detail


def test_a_controlnet_for_another_base_model_is_told(config):
    """With the numbers that differ, unless it fits one of the models, or may fit one that is not known yet."""
    here, other = config.parent, config.parent / "other" / "unet"
    shutil.copytree(WEIGHTS / "controlnets" / "edges", here / "edges")
    shutil.copytree(here / "base", other.parent)
    for unet in (here / "base" / "unet", other):
        wide = {**json.loads((unet / "config.json").read_text()), "cross_attention_dim": 2048}
        (unet / "config.json").write_text(json.dumps(wide))
    net = "controlnets: {a: {folder: edges}}"
    for models_given, told in (
        ("model: ./base", True), ("models: {x: ./base, y: ./other}", True), ("models: {x: ./base, e: emoji}", False),
        ("model: ./base, models_folder: .", False),
    ):  # fmt: skip
        config.write_text(f"images: {{{models_given}, {net}}}\nrecommend: null\n")
        found = [it for it in models.check_folders(load_config(config)) if "controlnets.a" in it.detail]
        assert [it.verdict for it in found] == [CheckStatus.WARN] * told
        assert all("the base model's is 2048: it is for another base model" in it.detail for it in found)


def test_a_file_that_cannot_become_a_folder_is_a_problem(config):
    """FLUX.1's transformer alone needs the folder of all else, and a folder that is named must be there."""
    path = config.parent / "flux.safetensors"
    save_file({"img_in.weight": np.ones((2, 64), np.float32), "double_blocks.0.img_mod.lin.weight": np.ones(2)}, path)
    sources = {"alone": "./flux.safetensors", "lost": {"file": "flux.safetensors", "config": "nowhere"}}
    config.write_text(f"images: {{models: {json.dumps(sources)}, controlnets: {{}}}}\nrecommend: null\n")
    says = {"alone": "a diffusers folder that has what the file lacks", "lost": "a checkpoint's config is a diffusers"}
    for name in sources:
        *_, last = models.check_model(load_config(config), name)
        assert (last.verdict, says[name] in last.detail) == (CheckStatus.FAIL, True), last


def test_what_lies_where_a_lora_would_is_looked_at(config):
    """A folder of PEFT's with something else in it is none; a LoRA of a store is looked at when it is fetched."""
    (config.parent / "peft").mkdir()
    (config.parent / "peft" / "adapter_model.safetensors").write_bytes(b"noise")
    (found,) = models.check_model(load_config(config), str(config.parent / "peft"))
    assert (found.verdict, "no LoRA that plait reads" in found.detail) == (CheckStatus.FAIL, True)
    entry = {"path": "x.safetensors", "sha256": "0" * 64, "nbytes": 5}
    store = {"url": "s3://bucket/loras", "cache_folder": "cache", "entries": {"far": entry}}
    config.write_text(f"images: {{loras: {json.dumps({'store': store})}}}\nrecommend: null\n")
    (found,) = models.check_model(load_config(config), "far")
    assert (found.verdict, found.detail) == (CheckStatus.OK, "far: checked when it is fetched")


@pytest.mark.parametrize(("name", "dtype", "says"), [
    ("a.ckpt", None, "a pickle"), ("a.gguf", None, "a GGUF checkpoint"),
    ("a.safetensors", np.uint8, "img_in.weight is U8: quantized"), ("a.safetensors", np.float32, "FLUX.1 Fill"),
])  # fmt: skip
def test_a_file_that_no_server_would_load_is_a_problem(config, name, dtype, says):
    """By its name, or by what its header says: as it is refused when it is loaded."""
    path = config.parent / name
    if dtype is None:
        path.write_bytes(b"GGUF")
    else:
        save_file({"img_in.weight": np.ones((2, 384), dtype), "double_blocks.0.img_mod.lin.weight": np.ones(2)}, path)
    (found,) = models.check_model(load_config(config), str(path))
    assert (found.verdict, says in found.detail) == (CheckStatus.FAIL, True), found
