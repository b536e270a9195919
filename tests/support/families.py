"""A family without an engine around it."""

from __future__ import annotations

from pathlib import Path

from plait_serving.diffusion.families import open_family
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
from plait_serving.diffusion.settings import EngineSettings, Host


def opened(folder: Path) -> Family:
    """What is known of the model in a folder; torch runs it."""
    host = Host(
        knobs=EngineKnobs, room_bytes=lambda: 0, is_idle=lambda: True, between_steps=lambda function: function()
    )
    return open_family(folder, EngineSettings(model=folder, executor=ExecutorName.TORCH), host)
