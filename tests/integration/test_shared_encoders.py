"""Two FLUX.1 with equal text encoders in one engine, which leave its memory and come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait_serving.diffusion import assemble
from plait_serving.diffusion.assemble import EngineSettings, build_engine_of
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.values import Scheduler
from support.denoise import make_request
from support.text_encoders import SeenEncoders, schnell_of, seen
from support.tiny_flow import tiny_flux
from support.waiting import wait_for

__all__ = ["seen"]

PROMPTS = ("a red cat", "two dogs")


def image(engine: Engine, prompt: str, model: str = "") -> np.ndarray:
    request = make_request(
        prompt=prompt, model=model, steps=2, guidance_scale=0.0, scheduler=Scheduler.EULER, max_sequence_length=16
    )
    return engine.generate(request, timeout_s=60.0).images[0]


def test_text_encoders_are_there_once_and_leave_where_memory_is_short(
    tmp_path: Path, seen: SeenEncoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5 is the same for both; once the host has no memory left it goes, comes back for a new prompt, goes again, and
    is not asked for one that is known."""
    dev = tiny_flux(tmp_path / "dev")
    folders = {"dev": dev, "schnell": schnell_of(dev, tmp_path / "schnell")}
    settings = {name: EngineSettings(model=folder, knobs=EngineKnobs(threads=1)) for name, folder in folders.items()}
    left = [1 << 40]
    reader = MemoryReader(left_bytes=lambda: left[0])
    monkeypatch.setattr(assemble, "memory_of", lambda *_, **__: reader)
    engine = build_engine_of(settings, memory_bytes=1 << 40)
    try:
        before = {name: image(engine, PROMPTS[0], name) for name in settings}
        assert engine.pool.statistics().resident == ("dev", "schnell")
        assert seen.alive == {"clip": 1, "t5": 1}
        left[0] = 0
        for name in settings:
            wait_for(lambda: not seen.alive["t5"], timeout_s=60)
            assert not np.array_equal(image(engine, PROMPTS[1], name), before[name])
        wait_for(lambda: not seen.alive["t5"], timeout_s=60)
        assert np.array_equal(image(engine, PROMPTS[0], "schnell"), before["schnell"])
        assert not seen.alive["t5"]
    finally:
        engine.stop(drain_s=0)
