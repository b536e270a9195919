"""Prepared programs take over from torch, if there is still a model to take over."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from plait_kernels.executors import background
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families import preparation
from plait_serving.diffusion.families.preparation import convert_behind, opened, preparer_for
from plait_serving.diffusion.knobs import ExecutorName

WAIT_S = 60.0


class Model:
    """What programs run for: it has those that it was given."""

    def __init__(self) -> None:
        self.programs: list[str] = []


class Preparer:
    """Prepares when it is let."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.made: list[str] = []

    def make(self, part: SimpleNamespace, name: str, _: object) -> str:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        self.made.append(f"{part.files.folder.name} {name}")
        return name


HALVES = {"encoder": None, "decoder": None}


def behind(preparer: Preparer, model: Model, folder: str) -> Callable[[], None]:
    """Convert the halves of a part, which nobody loads."""
    part = SimpleNamespace(files=SimpleNamespace(folder=Path(folder)))
    return convert_behind(preparer, part, HALVES, model, lambda here, programs: here.programs.extend(programs))


@pytest.mark.parametrize("leaves", [False, True])
def test_a_model_that_leaves_while_it_is_converted_is_not_kept_for_that(leaves):
    """Its weights go at once, and what was not begun is not converted; one that stays is taken over."""
    model, preparer = Model(), Preparer()
    for folder in ("unet", "vae"):
        behind(preparer, model, folder)
    assert preparer.begun.wait(WAIT_S)
    alive = weakref.ref(model)
    if leaves:
        del model
        assert alive() is None
    preparer.may.set()
    background.wait()
    assert len(preparer.made) == (2 if leaves else 4)
    if not leaves:
        assert model.programs == ["encoder", "decoder"] * 2


def test_a_conversion_that_waits_is_taken_back_by_a_model_that_leaves():
    """It never begins, and nothing refers to it any more, while the one before it goes on."""
    first, second, preparer, refused = Model(), Model(), Preparer(), Preparer()
    behind(preparer, first, "first")
    assert preparer.begun.wait(WAIT_S)
    stop = behind(refused, second, "second")
    stop()
    kept = weakref.ref(refused)
    del refused, stop
    assert kept() is None
    preparer.may.set()
    background.wait()
    assert preparer.made == ["first encoder", "first decoder"]
    assert second.programs == []


def test_a_part_of_which_one_program_is_missing_runs_on_torch():
    """As a start that was interrupted leaves it."""
    kept = {"encoder": "program"}
    preparer = SimpleNamespace(open=lambda part, name, compute: kept.get(name))
    assert opened(preparer, None, HALVES) == []
    kept["decoder"] = "other"
    assert opened(preparer, None, HALVES) == ["program", "other"]
    assert opened(None, None, HALVES) == []


@pytest.mark.parametrize(
    ("device", "dtype", "is_there", "why"),
    [
        ("cpu", torch.float32, False, "the package openvino is not installed"),
        ("cpu", torch.float16, True, "it computes in float32 or bfloat16, not in float16"),
        ("cuda", torch.float32, True, "it runs on CPUs, not on cuda"),
    ],
)
def test_where_openvino_cannot_run_torch_does_unless_it_is_asked_for(
    device, dtype, is_there, why, tmp_path, monkeypatch
):
    """By name it is a `ModelError` that says why."""
    monkeypatch.setattr(preparation, "available", lambda: is_there)
    prepares = partial(preparer_for, device=device, dtype=dtype, threads=lambda: 1, cache=tmp_path, auditor=Mock())
    assert prepares(ExecutorName.AUTO) is None
    with pytest.raises(ModelError, match=f"executor: openvino cannot be used: {why}"):
        prepares(ExecutorName.OPENVINO)
