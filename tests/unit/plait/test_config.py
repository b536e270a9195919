"""plait.yaml: what is refused names its path, what is accepted survives a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from plait.config import PlaitConfig, dump_config, load_config, parse_config
from plait.deployments import check_cpus, deployments, finishing, logical_cpus
from plait.errors import ConfigError, PlaitError
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.images.config import STARTER_FOLDER, AliasSection, ControlNetSection, DefaultsSection
from plait_serving.ranking.config import CnSection, HnSection, RankingSection, RankModelSection

REVISION = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, text: str) -> Path:
    path = folder / "plait.yaml"
    path.write_text(text)
    return path


def test_a_file_without_a_version_is_of_the_first(tmp_path):
    """What was written before files had versions is read as it was meant."""
    old, new = (
        load_config(write(tmp_path, "images: {replicas: 2}")),
        parse_config({"version": 1, "images": {"replicas": 2}}, source="", folder=tmp_path),
    )
    assert old == new
    assert yaml.safe_load(dump_config(old))["version"] == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version: 2", "version: 2 is newer than 1, the newest that this plait reads; upgrade plait"),
        ("images: {knobs: {exact: alone}}", "images.knobs.exact: alone is gone; never is fast"),
        ("images: {controlnets: {'../x': {folder: a}}}", "images.controlnets.../x"),
        ("images: {controlnets: {edges: {folder: Edges.PTH}}}", "edges.folder: 'Edges.PTH' is a single file"),
        (
            "images: {controlnets: {edges: {folder: a, preprocessor: canny}}}",
            "images.controlnets.edges.preprocessor: must be 'edges' or 'colors' (got 'canny')",
        ),
        (f"images: {{revision: {REVISION}}}", "revision belongs to a hub id"),
        ("images: {models: {a: ./a}, model: ./b, name: c}", "models names all models: leave out model, name"),
        (
            "images: {models: {a: owner/name}}",
            "models.a: 'owner/name' is a hub id: give its commit as owner/name@commit",
        ),
        ("images: {models: {a: emojy}}", "models.a: 'emojy' is neither 'emoji' nor a path"),
        ("images: {models: {'a+b': ./a}}", "images.models.a+b"),
        ("images: {aliases: {花: {model: emoji, loras: {pixel: 1}}}}", "images.aliases.花"),
        ("images: {controlnets: {my edges: {folder: a}}}", "images.controlnets.my edges"),
        ("recommend: {models: {_x: {folder: a}}}", "recommend.models._x"),
        ("images: {model: ./picks}", "images.model and recommend.models both have the name 'picks'"),
        ("images: {aliases: {picks: emoji}}", "images.aliases and recommend.models both have the name 'picks'"),
        (
            "images: {models: {a: ./b}}\nrecommend: {models: {a: {folder: c}}}",
            "images.models and recommend.models both have the name 'a'",
        ),
        ("images: {models_folder: a, aliases: {a: {model: a/b, loras: {b: 1}}}}", "a name has 1 to 200 characters"),
        ("images: {model: ./a.gguf}", "a.gguf' is a GGUF checkpoint, which is not supported"),
        ("images: {models: {a: {file: a.CKPT, config: b}}}", "models.a: '"),
        ("images: {models: {a: {file: a, config: b}}}", "is no .safetensors file"),
        ("images: {models: {a: {file: a.safetensors}}}", "config: must be given"),
        (
            "images: {aliases: {emoji: {model: emoji, loras: {pixel: 1}}}}",
            "aliases.emoji: there is a model of that name",
        ),
        ("images: {aliases: {dall-e-3: emoij}}", "no model 'emoij'; did you mean emoji?"),
        ("images: {aliases: {a: b, b: emoji}}", "images: aliases.a.model: 'b' is an alias itself"),
        ("images: {models_folder: m, aliases: {a: b, b: c}}", "images: aliases.a.model: 'b' is an alias itself"),
        ("images: {model: ~nobody.of.that.name/base}", "'~nobody.of.that.name/base' is neither 'emoji' nor a path"),
        ("images: {limits: {sizes: [512x]}}", "must be a size or two of them, the smaller first"),
        ("images: {limits: {sizes: [64x64-32x128]}}", "must be a size or two of them, the smaller first"),
        ("images: {limits: {sizes: ['0x64']}}", "must be a size or two of them, the smaller first"),
        ("images: {num_gpus: .inf}", "images.num_gpus: must be a finite number"),
        ("images: {results: {folder: a, response_format: file}}", "images.results.response_format: "),
        ("images: {loras: {folder: a, store: {url: 's3://b', entries: {}, cache_folder: c}}}", "not both"),
        ("images: {loras: {store: {url: b, entries: {}, cache_folder: c}}}", "needs a scheme"),
        (
            "images: {loras: {store: {url: 's3://b', cache_folder: c, "
            "entries: {x: {path: a, sha256: abc, nbytes: 1}}}}}",
            "entries.x.sha256",
        ),
        ("recommend: {models: {a: {folder: x, hn: {knobs: {window: 1}}}}}", "hn.knobs.window: unknown key"),
        (r'images: {loras: {folder: "/x\ud800"}}', "images.loras.folder: not valid Unicode"),
        (r'images: {models: {"a\ud800": ./b}}', "images.models: not valid Unicode"),
        ("- 1", "top level must be a mapping"),
        ("server: {port: 1}\nserver: {port: 2}", "line 2: 'server' is given twice"),
    ],
)
def test_config_refusal_names_the_path(tmp_path, text, problem):
    """Every refusal says where and why, and which file."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert problem in str(caught.value)
    assert str(tmp_path / "plait.yaml") in str(caught.value)


def test_a_configuration_that_is_a_link_to_itself_is_one_sentence(tmp_path):
    """The kernel's words."""
    path = tmp_path / "plait.yaml"
    path.symlink_to(path)
    with pytest.raises(ConfigError, match=r"plait\.yaml: Too many levels of symbolic links"):
        load_config(path)


def test_config_names_what_lies_in_folders_by_its_own_name(tmp_path):
    """A LoRA or a model of any script, also as macOS spells it; a model is named by its own folder or file."""
    text = (
        "images:\n  models_folder: more\n  aliases: {a: {model: my model, loras: {e\u0301: 1, 花 (b): 2}}}\n"
        f"  loras: {{store: {{url: 's3://b', cache_folder: c, "
        f"entries: {{_x: {{path: x, sha256: {'a' * 64}, nbytes: 1}}}}}}}}\n"
    )
    images = load_config(write(tmp_path, text)).images
    assert (images.aliases["a"].model, images.aliases["a"].loras) == ("my model", {"\u00e9": 1, "花 (b)": 2})
    assert list(images.loras.store.entries) == ["_x"]
    for model, name in (("./e\u0301", "\u00e9"), ("./A b.SAFETENSORS", "A b")):
        (alone,) = load_config(write(tmp_path, f"images: {{model: '{model}'}}")).images.base_models.items()
        assert alone[0] == name
        assert alone[1].is_file == model.endswith("S")


def test_config_reports_every_problem_at_once():
    """Two mistakes are told together."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["server.port=-1", "ray.adress=auto"])
    assert len(caught.value.problems) == 2


def test_config_relative_paths_are_relative_to_the_file(tmp_path):
    """A folder in a file is found from wherever the command runs."""
    text = "images: {model: ./base, loras: {folder: loras}, controlnets: {edges: {folder: cn/edges}}}\n"
    config = load_config(write(tmp_path, text + "recommend: {models: {mine: {folder: models/mine}}}"))
    images = config.images
    assert images.model == str(tmp_path / "base")
    assert images.loras.folder == tmp_path / "loras"
    assert images.resolved_controlnets() == {"edges": ControlNetSection(folder=tmp_path / "cn/edges")}
    assert images.public_name == "base"
    elsewhere = load_config(write(tmp_path, "images: {loras: {folder: ~nobody.of.that.name/loras}}")).images
    assert elsewhere.loras.folder == tmp_path / "~nobody.of.that.name/loras"
    assert config.ranking_models["mine"].folder == tmp_path / "models/mine"


def test_an_alias_renames_in_one_line(tmp_path):
    """With or without braces: names that OpenAI's clients send by themselves."""
    text = "images: {aliases: {dall-e-3: emoji, gpt-image-1.5: {model: emoji}}}"
    images = load_config(write(tmp_path, text)).images
    assert images.aliases["dall-e-3"] == images.aliases["gpt-image-1.5"] == AliasSection(model="emoji")


def test_several_models_are_read_by_name(tmp_path):
    """Folders beside the file, the starter model, and hub ids with their commits; the first is the default."""
    text = f"images: {{models: {{b: ./base, starter: emoji, hub: owner/name@{REVISION}}}, memory_bytes: 5000}}"
    config = load_config(write(tmp_path, text))
    models = config.images.base_models
    assert {name: base.folder for name, base in models.items()} == {
        "b": str(tmp_path / "base"), "starter": str(STARTER_FOLDER / "emoji"), "hub": "owner/name"
    }  # fmt: skip
    assert (models["hub"].revision, config.images.public_name) == (REVISION, "b")
    guided, bare = RequestTerms(takes=frozenset({"guidance_scale"})), RequestTerms(guidance_scale=0.0)
    assert [config.images.guidance_of(name, guided) for name in ("starter", "b")] == [3.0, 7.5]
    wanted = config.images.model_copy(update={"defaults": DefaultsSection(guidance_scale=4.0)})
    assert [wanted.guidance_of("b", terms) for terms in (guided, bare)] == [4.0, 0.0]
    assert config.public_names[:3] == ("b", "starter", "hub")
    assert parse_config(yaml.safe_load(dump_config(config)), source="dump", folder=Path("/")) == config


def test_a_checkpoint_in_one_file_is_a_model(tmp_path):
    """Beside the file, with or without the folder of its configuration; requests name it without the suffix."""
    (alone,) = load_config(write(tmp_path, "images: {model: ./v1.5-pruned.safetensors}")).images.base_models.items()
    assert (alone[0], alone[1].folder) == ("v1.5-pruned", str(tmp_path / "v1.5-pruned.safetensors"))
    assert alone[1].is_file
    text = "images: {models: {a: ./a.safetensors, own: {file: b.safetensors, config: ../c}}}"
    config = load_config(write(tmp_path, text))
    own = config.images.base_models["own"]
    assert (own.folder, own.config.resolve()) == (str(tmp_path / "b.safetensors"), tmp_path.parent / "c")
    assert config.images.base_models["a"].config is None
    assert parse_config(yaml.safe_load(dump_config(config)), source="dump", folder=Path("/")) == config


def test_config_cpus_cover_every_replica():
    """A local Ray is given at least the logical CPUs that all replicas ask for."""
    controlnets = {name: ControlNetSection(folder=Path("/x"), replicas=3) for name in "ab"}
    images = PlaitConfig().images.model_copy(update={"controlnets": controlnets, "replicas": 2})
    models = {
        "a": RankModelSection(folder=Path("/x"), cn=CnSection(replicas=4), hn=HnSection(replicas=2)),
        "b": RankModelSection(folder=Path("/x"), mode="whole", whole=HnSection(replicas=3)),
    }
    config = PlaitConfig(images=images, recommend=RankingSection(models=models))
    assert logical_cpus(config) >= 0.1 + 8 * 0.4 + 9 * 0.2
    budgets = load_config(overrides=["images.num_cpus=6.5", "images.replicas=2"])
    assert logical_cpus(budgets) - logical_cpus(load_config()) in (12, 13)  # rounded up to whole ones
    assert logical_cpus(PlaitConfig(images=None, recommend=RankingSection(models=models))) == 2


def test_a_setting_reaches_names_with_dots(tmp_path):
    """Those that the file has; of two that would do the longer one. A path that is not there is one key a dot."""
    path = write(tmp_path, "recommend: {models: {v1: {folder: a}, v1.5: {folder: b, cn: {replicas: 2}}}}")
    changed = ["recommend.models.v1.5.cn.knobs.threads=3", "recommend.models.v1.cn.replicas=4", "server.port=1"]
    config = load_config(path, overrides=changed)
    first, second = config.ranking_models["v1"].cn, config.ranking_models["v1.5"].cn
    assert (first.replicas, second.replicas, second.knobs.threads, config.server.port) == (4, 2, 3, 1)
    with pytest.raises(ConfigError, match=r"recommend\.models\.v2\.5: unknown key"):
        load_config(path, overrides=["recommend.models.v2.5.cn.replicas=1"])


def test_a_ray_without_room_for_the_replicas_is_refused():
    """They would wait for ten minutes; those that may come later count for nothing, nor does a Ray of others."""
    few = ["ray.num_cpus=1", "recommend=null", "images.controlnets={}"]
    check_cpus(load_config(overrides=[*few, "images.replicas={min: 1, max: 9}"]))
    check_cpus(load_config(overrides=["ray.num_cpus=1", "images.num_cpus=2", "ray.address=auto"]))
    with pytest.raises(PlaitError, match=r"^ray\.num_cpus: 1 is too few for the replicas, which reserve 2\.1$"):
        check_cpus(load_config(overrides=[*few, "images.num_cpus=2"]))


def test_config_of_one_workload_leaves_the_other_out():
    """Either section may be null, not both; what is served, drained and tuned follows."""
    ranks = load_config(overrides=["images=null", "recommend.models.a.folder=/x"])
    assert (ranks.public_names, finishing(deployments(ranks))) == (("a",), ("cn-a", "ingress"))
    assert {row.name for row in deployments(ranks) if row.knobs} == {"cn-a", "hn-a"}
    draws = load_config(overrides=["recommend=null", "images.controlnets={}"])
    assert (draws.public_names, finishing(deployments(draws))) == (("emoji",), ("engine", "ingress"))
    assert {row.name for row in deployments(draws) if row.knobs} == {"engine"}
    whole = load_config(overrides=["recommend.models.a={folder: /x, mode: whole}"])
    assert finishing(deployments(whole)) == ("engine", "whole-a", "ingress")
    for nothing in (["images=null", "recommend=null"], ["images=null", "recommend.models={}"]):
        with pytest.raises(ConfigError, match="nothing to serve"):
            load_config(overrides=nothing)
