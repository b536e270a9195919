"""What is said where bfloat16 was asked for and the CPU does not compute it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.precision import with_dtype
from plait_serving.diffusion import memory
from plait_serving.diffusion.memory import warn_of_emulation
from plait_serving.images.config import ImagesSection


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    """It is said once a process."""
    warn_of_emulation.cache_clear()
    yield
    warn_of_emulation.cache_clear()


@pytest.mark.parametrize("native", [True, False])
def test_it_is_said_once(native: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """However many models there are; nothing where the CPU computes it."""
    monkeypatch.setattr(memory, "has_bfloat16", lambda: native)
    warn_of_emulation()
    warn_of_emulation()
    assert ["has no instructions" in record.getMessage() for record in caplog.records] == [True] * (not native)


@pytest.mark.parametrize(("dtype", "lines"), [("auto", 0), ("float32", 0), ("bfloat16", 1)])
def test_a_command_says_it_before_it_starts(
    dtype: str, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a dtype that was asked for; one that was left out is never bfloat16 there."""
    monkeypatch.setattr(memory, "has_bfloat16", lambda: False)
    found = with_dtype(ImagesSection(device="cpu", dtype=dtype), native=lambda: False)
    assert found.dtype == ("float32" if dtype == "auto" else dtype)
    assert len(caplog.records) == lines
