"""Which text encoders of Stable Diffusion 3 and FLUX.1 are called, and are in memory; models that have equal ones."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import CLIPTextModel, T5EncoderModel

from support.tiny_flow import tiny_flux

_KINDS = {"clip": CLIPTextModel, "t5": T5EncoderModel}


@dataclass
class SeenEncoders:
    """Those that were called, and by kind how often."""

    calls: Counter[str] = field(default_factory=Counter)
    modules: dict[int, ref[nn.Module]] = field(default_factory=dict)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        for name, kind in _KINDS.items():
            if isinstance(module, kind):
                self.calls[name] += 1
                self.modules[id(module)] = ref(module)

    @property
    def alive(self) -> Counter[str]:
        """How many of those are in memory."""
        here = [each() for each in self.modules.values()]
        return Counter(name for name, kind in _KINDS.items() for each in here if isinstance(each, kind))


@pytest.fixture
def seen() -> Iterator[SeenEncoders]:
    """Those that the test calls."""
    found = SeenEncoders()
    handle = register_module_forward_hook(found)
    yield found
    handle.remove()


def schnell_of(dev: Path, folder: Path) -> Path:
    """Writes a schnell with copies of another model's text encoders."""
    tiny_flux(folder, seed=5, guidance=False)
    for part in ("text_encoder", "text_encoder_2"):
        shutil.rmtree(folder / part)
        shutil.copytree(dev / part, folder / part)
    return folder
