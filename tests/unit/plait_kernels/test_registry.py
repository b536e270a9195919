"""Choosing an implementation: explicit choices hold or raise, automatic ones say what they passed over."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types

import pytest
import torch

from plait_kernels import registry
from plait_kernels.registry import IMPLS, ImplInfo, KernelError, select_impl

SLOW = ImplInfo(
    op="op",
    name="slow",
    entry="m:f",
    devices=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({torch.float32, torch.float16}),
)
FAST = ImplInfo(
    op="op",
    name="fast",
    entry="m:g",
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.float16}),
)


def choose(device: str, dtype: torch.dtype, explicit: str | None = None):
    """`select_impl` over the two records above."""
    return select_impl("op", device, dtype, explicit, impls=(FAST, SLOW))


def test_the_best_that_fits_is_chosen():
    """What does not fit is passed over with its reason."""
    assert choose("cuda", torch.float16) == (FAST, ())
    assert choose("cpu", torch.float16) == (SLOW, ("fast: does not run on cpu",))
    assert choose("cuda", torch.float32) == (SLOW, ("fast: does not write torch.float32",))


@pytest.mark.parametrize("explicit", ["fast", "unheard-of"])
def test_explicit_choice_never_falls_back(explicit):
    """Asking for an implementation that does not fit, or does not exist, raises."""
    with pytest.raises(KernelError, match=explicit):
        choose("cpu", torch.float16, explicit)


def test_nothing_fits_raises():
    """An operator without a fitting implementation raises, naming every reason."""
    with pytest.raises(KernelError, match=r"fast: .*; slow: .*"):
        choose("tpu", torch.float16)
    with pytest.raises(KernelError, match="unknown"):
        select_impl("no-such-op", "cpu", torch.float32)


def test_load_logs_once_what_was_passed_over(monkeypatch, caplog):
    """The fallback is in the log, once per operator, device and dtype."""
    picky = dataclasses.replace(IMPLS[0], name="picky", devices=frozenset({"cuda"}))
    monkeypatch.setitem(registry.select_impl.__kwdefaults__, "impls", (picky, *IMPLS))
    registry.load.cache_clear()
    with caplog.at_level(logging.INFO, logger="plait_kernels.registry"):
        first = registry.load("lora_merge", "cpu", torch.float32)
        assert registry.load("lora_merge", "cpu", torch.float32) is first
    registry.load.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "picky: does not run on cpu" in caplog.text


def test_what_does_not_compile_here_is_passed_over_and_tried_once(monkeypatch):
    """Without a compiler the first image runs on the reference; by name it is refused, with the reason."""
    tries = []

    def trial(device, dtype):
        tries.append((device, dtype))
        raise RuntimeError("Failed to find C compiler\nPlease specify via CC")

    broken = types.ModuleType("broken_kernel")
    broken.trial = trial
    monkeypatch.setitem(sys.modules, "broken_kernel", broken)
    compiled = dataclasses.replace(FAST, entry="broken_kernel:g", compiled=True)
    for _ in range(2):
        selection = select_impl("op", "cuda", torch.float16, impls=(compiled, SLOW))
        reason = "fast: does not run here (RuntimeError: Failed to find C compiler)"
        assert selection == (SLOW, (reason,))
    with pytest.raises(KernelError, match="Failed to find C compiler"):
        select_impl("op", "cuda", torch.float16, "fast", impls=(compiled, SLOW))
    assert tries == [("cuda", torch.float16)]


def test_what_is_compiled_can_be_tried():
    """Each trial runs its operator: here line by line, on a GPU by its compiler."""
    pytest.importorskip("triton", reason="needs triton: make setup-kernels")
    compiled = [impl for impl in IMPLS if impl.compiled]
    assert {impl.op for impl in compiled} == {impl.op for impl in IMPLS if impl.name == "triton"}
    assert [registry.trial_failure(impl, "cpu", torch.float16) for impl in compiled] == [None] * len(compiled)
