"""Fixtures of the whole suite. Models and the Ray cluster are made once a session."""

from __future__ import annotations

import signal

import torch

from support.cluster import shared_serve
from support.tiny import (
    tiny_models,
    tiny_sd_controlnets,
    tiny_sd_folder,
    tiny_sdxl_controlnets,
    tiny_sdxl_folder,
)

__all__ = [
    "shared_serve",
    "tiny_models",
    "tiny_sd_controlnets",
    "tiny_sd_folder",
    "tiny_sdxl_controlnets",
    "tiny_sdxl_folder",
]

# Two cores, several processes: one thread each is what the numbers in the tests assume.
torch.set_num_threads(1)

# A shell starts its background jobs with Ctrl-C ignored, and Python keeps it so: tests that press it would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)
