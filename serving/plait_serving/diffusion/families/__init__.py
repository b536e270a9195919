"""The families of image models, and the only module that says which there are.

A family is a folder of this package: all that differs between architectures, and nothing else. It has

- a class of what is known of one model without its weights (`Family`): its kind, sizes, samplers, what LoRAs may
  change, how long prompts are, which ControlNets fit; `load` brings the weights into memory,
- a `Denoiser` (`protocols.py`), which `load` returns: conditioning, latents, schedule, a step with its guidance,
  decoding, and the mergers of LoRA sets.

What is in this folder beside them is shared by families: rows of a batch (`rows`), LoRA sets as inputs (`factors`),
executors' programs (`preparation`) and the weights beside them (`resident_weights`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.families.unet.family import UNetFamily
from plait_serving.diffusion.settings import EngineSettings, Host

__all__ = ["ControlNetRunner", "Family", "load_controlnet", "open_family"]

Family: TypeAlias = UNetFamily
ControlNetRunner: TypeAlias = ControlNetModelRunner


def open_family(folder: Path, settings: EngineSettings, host: Host) -> Family:
    """Return what is known of the model in a diffusers folder. Raises `ModelError`."""
    return UNetFamily(folder, settings, host)
