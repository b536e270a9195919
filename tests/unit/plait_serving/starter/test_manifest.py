"""The starter models' files: complete, unchanged, small enough, and what verifying needs is among them."""

from __future__ import annotations

import numpy as np
import pytest

from plait_serving.starter.manifest import WEIGHTS, files_in, manifest_problems, write_manifest
from plait_serving.starter.references import References, load_references, make_references, save_references


def test_shipped_files_are_as_listed():
    """Every shipped file has the sha256 of the manifest, and no file is unlisted."""
    assert manifest_problems(WEIGHTS) == []


def test_shipped_files_fit_in_32_megabytes():
    """History keeps every version of these files, so together they stay small."""
    assert sum((WEIGHTS / name).stat().st_size for name in files_in(WEIGHTS)) <= 32 << 20


def test_enough_concepts_and_each_with_its_references():
    """At least 300 different lower-case prompts, each with images and a line map that is not empty."""
    refs = load_references(WEIGHTS)
    assert len(set(refs.names)) == len(refs.names) >= 300
    assert all(name == name.lower() for name in refs.names)
    assert refs.twemoji.shape == refs.noto.shape == (len(refs.names), 16, 16, 3)
    assert refs.edges.any(axis=(1, 2)).all()


def test_hash_order_is_a_fixed_permutation():
    """The order of concepts does not depend on the order in the file."""
    refs = load_references(WEIGHTS)
    order = refs.hash_order()
    turned = References(names=refs.names[::-1], twemoji=refs.twemoji[::-1], noto=refs.noto[::-1],
                        sketch=refs.sketch[::-1], edges=refs.edges[::-1])  # fmt: skip
    assert sorted(order) == list(range(len(refs.names)))
    assert [turned.names[i] for i in turned.hash_order()] == [refs.names[i] for i in order]


@pytest.mark.parametrize("harm", ["change", "remove", "add"])
def test_any_harm_is_named(tmp_path, harm):
    """A changed, a missing and an extra file are each reported by name."""
    for name in ("a.json", "b/c.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path)
    assert manifest_problems(tmp_path) == []
    target = tmp_path / "b" / ("extra" if harm == "add" else "c.safetensors")
    if harm == "remove":
        target.unlink()
    else:
        target.write_text("other")
    (problem,) = manifest_problems(tmp_path)
    assert target.relative_to(tmp_path).as_posix() in problem


def test_a_folder_without_a_manifest_is_a_problem(tmp_path):
    """No manifest is reported, not taken as nothing to check."""
    assert manifest_problems(tmp_path) == ["MANIFEST.json is missing"]
    for text in ("[]", "{", '{"files": {"a": 1}}'):
        (tmp_path / "MANIFEST.json").write_text(text)
        (problem,) = manifest_problems(tmp_path)
        assert "cannot be compared with the manifest" in problem


def test_references_survive_saving(tmp_path):
    """What is written is read back: maps bit for bit, enlarged colour maps with the right means."""
    images = np.random.default_rng(4).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    made = make_references(("a", "b", "c"), images, images[::-1])
    save_references(made, tmp_path)
    read = load_references(tmp_path)
    assert read.names == made.names
    assert np.array_equal(read.edges, made.edges)
    assert np.array_equal(read.color_map(1)[::4, ::4], made.twemoji[1])
    assert np.array_equal(read.edge_map(2)[..., 0] > 0, made.edges[2])
