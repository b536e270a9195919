"""Prepared programs take over from torch, if there is still a model to take over."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait_kernels.executors import background
from plait_serving.diffusion.families.unet.programs import UNetPrograms

WAIT_S = 60.0


class Part:
    """A denoiser: it notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str):
        return lambda *_: self.told.append(name)


class Preparer:
    """Prepares when it is let."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.made: list[str] = []

    def open(self, *_: object) -> None:
        """Nothing was prepared before."""

    def make(self, part: SimpleNamespace, name: str, _: object) -> str:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        self.made.append(f"{part.files.folder.name} {name}")
        return "program"


HALVES, DECODER = ["unet encoder", "unet decoder"], ["vae vae-decoder"]


def parts(model: str) -> dict[str, SimpleNamespace]:
    """Those of a model's folder; nobody loads them."""
    return {part: SimpleNamespace(files=SimpleNamespace(folder=Path(model) / part)) for part in ("unet", "vae")}


@pytest.mark.parametrize("leaves", [False, True])
def test_a_model_that_leaves_while_it_is_converted_is_not_kept_for_that(leaves):
    """Its weights go at once, and what was not begun is not converted; one that stays is taken over."""
    denoiser, preparer, prepared = Part(), Preparer(), set()
    UNetPrograms(preparer, parts("model")).convert_behind(lambda function: function(), denoiser, prepared)
    assert preparer.begun.wait(WAIT_S)
    alive = weakref.ref(denoiser)
    if leaves:
        del denoiser
        assert alive() is None
    preparer.may.set()
    background.wait()
    assert preparer.made == (HALVES if leaves else HALVES + DECODER)
    assert prepared == (set() if leaves else {"unet", "vae"})
    if not leaves:
        assert denoiser.told == ["take_over", "adopt_vae"]


def test_a_conversion_that_waits_is_taken_back_by_a_model_that_leaves():
    """It never begins, and nothing refers to it any more, while the one before it goes on."""
    first, second, preparer, refused = Part(), Part(), Preparer(), Preparer()
    UNetPrograms(preparer, parts("first")).convert_behind(lambda function: function(), first, set())
    assert preparer.begun.wait(WAIT_S)
    stop = UNetPrograms(refused, parts("second")).convert_behind(lambda function: function(), second, set())
    stop()
    kept = weakref.ref(refused)
    del refused, stop
    assert kept() is None
    preparer.may.set()
    background.wait()
    assert preparer.made == HALVES + DECODER
    assert second.told == []
