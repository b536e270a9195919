"""Weights that are in memory only while torch runs the module: an executor that took over holds its own.

Otherwise the parameters are the file's bytes, memory-mapped: shapes and configuration stay available and nothing but
page cache is used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

import torch
from torch import nn

from plait_serving.diffusion.families.encoders import WeightedPart

_log = logging.getLogger(__name__)


class ResidentWeights:
    """The parameters of one module. Threads may race to `take`; nobody may `release` while torch runs the module."""

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        part: WeightedPart,
        resident: bool,
        always: tuple[str, ...] = (),
    ) -> None:
        """Take a module of a `part`: loaded (`resident`), or mapped. Modules in it named in `always` stay in memory."""
        stay = tuple(f"{each}." for each in always)
        self._module = module
        self._name = name
        self._part = part
        # What stays may be running on another thread at any time: nobody may touch it after this.
        self._going = {name: each for name, each in module.named_parameters() if not name.startswith(stay)}
        self.resident = resident
        self._lock = threading.Lock()
        if not resident:
            _bring([each for name, each in module.named_parameters() if name.startswith(stay)], part.dtype)

    def take(self) -> None:
        """Bring the weights into memory in the dtype that torch computes with. Does nothing if they are there."""
        with self._lock:
            if self.resident:
                return
            started_s = time.perf_counter()
            _bring(self._going.values(), self._part.dtype)
            self.resident = True
        nbytes = sum(parameter.nbytes for parameter in self._module.parameters())
        _log.info("%s: %.1f GB for torch in %.1f s", self._name, nbytes / 1e9, time.perf_counter() - started_s)

    def release(self) -> None:
        """Give the memory back. The weights must be pristine: what was merged into them would be lost."""
        with self._lock:
            if not self.resident:
                return
            mapped = dict(self._part.mapped().named_parameters())
            for name, parameter in self._going.items():
                parameter.data = mapped[name].data
            self.resident = False


def _bring(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Replace mapped bytes by a copy in memory."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype, copy=True)
