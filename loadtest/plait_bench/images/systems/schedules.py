"""What a careful user of diffusers sets when another scheduler takes over a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["schedule_of"]


def schedule_of(pipeline: Any) -> Mapping[str, Any]:
    """Return the configuration of a pipeline's scheduler, for others to be made from.

    Stable Diffusion 1 and 2 were trained without clipping; diffusers corrects a scheduler that says otherwise when a
    pipeline is loaded, but not one that is made later from a configuration that says nothing. SDXL's is left as it is.
    """
    config = dict(pipeline.scheduler.config)
    return config if "XL" in type(pipeline).__name__ else {"clip_sample": False, "steps_offset": 1, **config}
