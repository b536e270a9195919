"""What compiling gave is kept: a later start does not compile, and what cannot be used is compiled anew."""

from __future__ import annotations

import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from support.executors import by_hand, openvino_at, small_block, small_computation, small_factors, small_inputs

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors import compiled_cache, openvino_program  # after the skip
from plait_kernels.executors.compiled_cache import CompiledCache


@pytest.fixture
def copy(converted, tmp_path):
    """A copy of the store."""
    return shutil.copytree(converted, tmp_path / "copy")


def answers(program, block) -> bool:
    """Whether it computes what the module does, with and without factors, for shapes it has not seen."""
    inputs, factors = small_inputs(3, 4, 5), small_factors([{"point": 2}, {}, {"conv_in": 3, "down": 1}])
    return all(
        float((program.run(inputs, given)[0] - by_hand(block, inputs, given)[0]).abs().max()) < 1e-4
        for given in (None, factors)
    )


def kept(store):
    """The files in an entry that hold what compiling gave."""
    return sorted((store / "k").glob("compiled-*.blob"))


def test_a_later_start_does_not_compile(copy, block, compiled):
    """Nor does it hold the weights twice on disk."""
    assert answers(openvino_at(copy).open("k"), block)
    assert not compiled
    (blob,) = kept(copy)
    assert blob.stat().st_size < (copy / "k" / "model.xml").stat().st_size + 2_000


def test_other_options_and_processors_have_their_own(copy, block, compiled, monkeypatch):
    """Two kinds of processors may share a home folder."""
    assert answers(openvino_at(copy, threads=lambda: 2).open("k"), block)
    assert (len(compiled), len(kept(copy))) == (1, 2)
    monkeypatch.setattr(compiled_cache, "core", lambda: SimpleNamespace(get_property=lambda *_: "another processor"))
    assert answers(openvino_at(copy).open("k"), block)
    assert (len(compiled), len(kept(copy))) == (2, 3)


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_what_is_damaged_is_compiled_anew_and_kept_again(copy, block, compiled, caplog, damage):
    """By its own digest, before OpenVINO sees it; what is no model by OpenVINO's word."""
    (blob,) = kept(copy)
    whole = blob.read_bytes()
    body = b"no model"
    changed = {
        "cut": whole[:-100],
        "flipped": whole[:500] + bytes([whole[500] ^ 1]) + whole[501:],
        "foreign": compiled_cache.hashlib.sha256(body).digest() + body,
    }
    blob.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert answers(openvino_at(copy).open("k"), block)
    assert len(compiled) == 1
    assert "made again" in caplog.text
    assert blob.name in caplog.text
    assert blob.read_bytes() != changed[damage]
    assert answers(openvino_at(copy).open("k"), block)
    assert len(compiled) == 1


def test_what_computes_something_else_is_compiled_anew(copy, block, compiled, caplog, monkeypatch):
    """The probe is run on what was kept, too; the entry stays."""
    changed = small_block(torch.float16)
    changed.point.weight.mul_(1.01)
    openvino_at(copy.parent / "other").prepare("k", lambda: small_computation(changed))
    wrong = openvino_program.compile_model(*compiled[-1])
    monkeypatch.setattr(CompiledCache, "load", lambda *_: wrong)
    with caplog.at_level(logging.INFO):
        assert answers(openvino_at(copy).open("k"), block)
    assert "differs from torch" in caplog.text
    assert (copy / "k" / "model.xml").is_file()


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ((compiled_cache.tempfile, "NamedTemporaryFile"), OSError(28, "No space left on device")),
        ((openvino_program.ov.CompiledModel, "export_model"), RuntimeError("this model cannot be exported")),
    ],
)
def test_where_nothing_can_be_kept_each_start_compiles(copy, block, compiled, caplog, monkeypatch, place, error):
    """A full disk, a model that OpenVINO does not export: said, and nothing is left behind; what was converted
    stays."""

    def fails(*_, **__):
        raise error

    (blob,) = kept(copy)
    blob.unlink()
    before = sorted((copy / "k").iterdir())
    monkeypatch.setattr(*place, fails)
    with caplog.at_level(logging.WARNING):
        assert answers(openvino_at(copy).open("k"), block)
    assert str(error) in caplog.text
    assert sorted((copy / "k").iterdir()) == before
    assert len(compiled) == 1
