"""`plait audit show` on what an audit has really kept."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from plait.cli.main import main
from plait_kernels.executors import Computation, InputSpec
from plait_kernels.executors.audit import Auditor, AuditPlan
from plait_kernels.executors.torch_program import TorchProgram
from support.http_app import pixels


class Painter(torch.nn.Module):
    """Its input, larger."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Scale it."""
        return (2.0 * x,)


class Smudge(TorchProgram):
    """A program with one wrong pixel."""

    def run(self, inputs, factors=None, *, copy=True):
        """Compute, and smudge."""
        made = super().run(inputs, factors, copy=copy)[0].clone()
        made[0, :, 1, 2] += 4.0
        return (made,)


@pytest.fixture
def folder(tmp_path):
    """Where one drift was kept, of images of 3 x 4 x 5."""
    specs = (InputSpec(name="x", shape=(None, 3, None, None)),)
    computation = Computation(module=Painter(), inputs=specs, example=(torch.zeros(1, 3, 4, 5),))
    auditor = Auditor(AuditPlan(folder=tmp_path / "audit", quiet_s=0.0), idle=lambda: True)
    program = auditor.watch("painter", Smudge(computation), lambda: TorchProgram(computation), tolerance=1e-3)
    program.run([torch.linspace(0, 1, 60).reshape(1, 3, 4, 5)])
    auditor.wait()
    return tmp_path / "audit"


def test_drifts_are_listed(folder, capsys):
    """With their program, how far they were off, and the file; the exit code says that there are some."""
    assert main(["audit", "show", "--folder", str(folder), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["program"] == "painter"
    assert float(found["share_of_tolerance"]) == pytest.approx(4.0 / 2.0 / 1e-3, rel=1e-3)
    assert found["file"].startswith(str(folder))


def test_the_page_shows_both_answers_and_where_they_differ(folder, tmp_path, capsys):
    """Three pictures: the last one is black but for the pixel that was smudged."""
    assert main(["audit", "show", "--folder", str(folder), "--out", str(tmp_path / "audit.html")]) == 1
    text = (tmp_path / "audit.html").read_text()
    encoded = re.findall(r"data:image/png;base64,([^\"]+)", text)
    images = [pixels(each) for each in encoded]
    assert [image.shape for image in images] == [(4, 5, 3)] * 3
    assert np.argwhere(images[2].any(axis=2)).tolist() == [[1, 2]]
    assert (images[0] != images[1]).any(axis=2).sum() == 1


def test_nothing_kept_is_said(tmp_path, monkeypatch, capsys):
    """A cache without drifts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    assert main(["audit", "show", "--out", str(tmp_path / "p.html")]) == 0
    assert "no audited answer has differed" in capsys.readouterr().out
    assert "no audited answer has differed" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0nonsense", None])
def test_a_file_of_another_kind_is_named(tmp_path, capsys, content):
    """A damaged file, and one that no audit wrote: one sentence, exit code 1."""
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    if content is None:
        save_file({"a": torch.zeros(1)}, path)
    else:
        path.write_bytes(content)
    assert main(["audit", "show", "--folder", str(tmp_path)]) == 1
    assert "x.safetensors: not" in capsys.readouterr().err
