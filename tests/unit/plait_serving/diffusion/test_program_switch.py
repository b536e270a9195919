"""Prepared programs take over from torch, if there is still a model to take over."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest

from plait_kernels.executors import background
from plait_serving.diffusion.program_switch import ProgramSwitch

WAIT_S = 60.0


class Part:
    """A denoiser, a merger or a keeper of weights: it notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str):
        return lambda *_: self.told.append(name)


class Preparer:
    """Prepares when it is let."""

    def __init__(self) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.made: list[str] = []

    def open_unet(self, _: Path) -> None:
        """Nothing was prepared before."""

    open_vae = open_unet

    def make_unet(self, _: Path) -> str:
        self.begun.set()
        assert self.may.wait(WAIT_S)
        self.made.append("unet")
        return "halves"

    def make_vae(self, _: Path) -> str:
        self.made.append("vae")
        return "program"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_model_that_leaves_while_it_is_converted_is_not_kept_for_that(leaves):
    """Its weights go at once, and what was not begun is not converted; one that stays is taken over."""
    denoiser, merger, weights = Part(), Part(), Part()
    preparer, prepared = Preparer(), set()
    ProgramSwitch(preparer, Path("model")).convert_behind(
        lambda function: function(), denoiser, merger=merger, weights=weights, prepared=prepared
    )
    assert preparer.begun.wait(WAIT_S)
    alive = [weakref.ref(part) for part in (denoiser, merger, weights)]
    if leaves:
        del denoiser, merger, weights
        assert [one() for one in alive] == [None, None, None]
    preparer.may.set()
    background.wait()
    assert preparer.made == (["unet"] if leaves else ["unet", "vae"])
    assert prepared == (set() if leaves else {"unet", "vae"})
    if not leaves:
        assert denoiser.told == ["adopt", "adopt_vae"]
        assert (merger.told, weights.told) == (["forget"], ["release"])
