"""Fixtures of the whole suite. Models and the Ray cluster are made once a session."""

from __future__ import annotations

import signal

import pytest
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


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """How `make test` shares the suite between two processes: a file's tests stay together, for its fixtures, and all
    that start Ray are one group, so that there is one Ray at a time. That group takes longest and goes first."""
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
    for item in items:
        group = "cluster" if item.get_closest_marker("cluster") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
