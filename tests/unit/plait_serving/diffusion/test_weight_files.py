"""Finding a part's weights by their headers: which set is taken, and what is told of a folder that is not whole."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.weight_files import find_weights

STEM = "diffusion_pytorch_model"


def save(folder, name, **tensors):
    """Write one file of tensors."""
    save_file(tensors, folder / name, metadata={"format": "pt"})


def shards(folder, variant="", stem=STEM):
    """Write two shards and their index; return the shards' names."""
    names = [f"{stem}{variant}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save(folder, names[0], a=torch.zeros(2, 3))
    save(folder, names[1], b=torch.zeros(5))
    table = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    (folder / f"{stem}.safetensors.index{variant}.json").write_text(json.dumps(table))
    return names


@pytest.mark.parametrize("stem", [STEM, "model"])
def test_a_whole_file(tmp_path, stem):
    """Its tensors are counted as they are stored and as they are wanted; integers stay what they are."""
    ids = torch.arange(7)
    save(tmp_path, f"{stem}.safetensors", a=torch.zeros(2, 3).half(), position_ids=ids)
    found = find_weights(tmp_path)
    assert (found.variant, [path.name for path in found.files]) == (None, [f"{stem}.safetensors"])
    assert found.tensors.keys() == {"a", "position_ids"}
    assert found.nbytes == 6 * 2 + 7 * 8
    assert found.nbytes_as(torch.float32) == 6 * 4 + 7 * 8
    assert found.nbytes_as(torch.bfloat16) == found.nbytes


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_shards_are_counted_together(tmp_path, variant):
    """All of them, of a plain set and of a variant."""
    names = shards(tmp_path, variant)
    found = find_weights(tmp_path)
    assert [path.name for path in found.files] == names
    assert found.variant == (variant[1:] or None)
    assert found.nbytes == (6 + 5) * 4
    assert {name: path.name for name, (path, _) in found.tensors.items()} == {"a": names[0], "b": names[1]}


def test_the_plain_set_wins_over_variants(tmp_path):
    """As the libraries have it; of several variants alone none is chosen."""
    save(tmp_path, f"{STEM}.fp16.safetensors", a=torch.zeros(1))
    assert find_weights(tmp_path).variant == "fp16"
    save(tmp_path, f"{STEM}.non_ema.safetensors", a=torch.zeros(1))
    with pytest.raises(ModelError, match="no weights found"):
        find_weights(tmp_path)
    save(tmp_path, f"{STEM}.safetensors", a=torch.zeros(1))
    assert find_weights(tmp_path).variant is None


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_a_missing_shard_is_named(tmp_path, variant):
    """Also when none of them is there."""
    names = shards(tmp_path, variant)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path / names[1]}: missing")):
        find_weights(tmp_path)
    (tmp_path / names[0]).unlink()
    with pytest.raises(ModelError, match=re.escape(f"{names[0]} and 1 more of 2 shards: missing")):
        find_weights(tmp_path)


def test_a_link_that_leads_nowhere_is_told_as_such(tmp_path):
    """The file seems to be there."""
    (tmp_path / f"{STEM}.safetensors").symlink_to("../../blobs/1")
    with pytest.raises(ModelError, match=rf"{STEM}.safetensors: a link that leads nowhere"):
        find_weights(tmp_path)


def test_shards_without_an_index(tmp_path):
    """The index is what is missing then."""
    shards(tmp_path)
    index = tmp_path / f"{STEM}.safetensors.index.json"
    index.unlink()
    with pytest.raises(ModelError, match=re.escape(f"{index}: missing")):
        find_weights(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"weight_map": 3})])
def test_a_damaged_index_is_named(tmp_path, text):
    """Whatever is wrong with it."""
    shards(tmp_path)
    index = tmp_path / f"{STEM}.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(ModelError, match=re.escape(f"{index}: not a readable index")):
        find_weights(tmp_path)


def test_an_index_reads_nothing_outside_its_folder(tmp_path):
    """A name with a path in it is refused."""
    (tmp_path / f"{STEM}.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    with pytest.raises(ModelError, match=re.escape("../b.safetensors is not a file of its folder")):
        find_weights(tmp_path)


def test_a_file_that_is_cut_off_or_something_else_is_named(tmp_path):
    """A download that broke off is known before anything is loaded."""
    path = tmp_path / f"{STEM}.safetensors"
    save(tmp_path, path.name, a=torch.zeros(1000))
    whole = path.read_bytes()
    for content in (whole[:-8], whole[:20], b"version https://git-lfs.github.com/spec/v1\n", b""):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=re.escape(str(path))):
            find_weights(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_weights_of_a_wrong_dtype_are_named(tmp_path, dtype):
    """Integers are no weights (of a quantised model, say): loaded as they are, they would fail in the first step."""
    save(tmp_path, f"{STEM}.safetensors", **{"conv.bias": torch.zeros(2), "conv.weight": torch.zeros(2, dtype=dtype)})
    with pytest.raises(ModelError, match=r"conv\.weight is .*must be F16, BF16 or F32"):
        find_weights(tmp_path)
