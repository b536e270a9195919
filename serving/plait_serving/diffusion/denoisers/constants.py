"""What a batch of the same requests computes once instead of in every step, kept until the weights change.

Text rows, SDXL's added embedding and the text's keys and values depend only on the requests' conditioning and on the
weights. A batch keeps its composition for many steps; a small least-recently-used store holds the latest ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait_serving.diffusion.denoisers.batch import BatchLayout, stack_conditionings
from plait_serving.diffusion.denoisers.fast import FastText, fast_text
from plait_serving.diffusion.protocols import Conditioning

_COMPOSITIONS = 8
"""The number of batches remembered: enough for several groups that alternate, each with two prompt lengths."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchConstants:
    """`text (R, L, C)`, SDXL's added inputs stacked to R rows, and (fast path only) keys and values."""

    text: torch.Tensor
    added: dict[str, torch.Tensor]
    fast: FastText | None

    @property
    def nbytes(self) -> int:
        """The bytes held."""
        own = self.text.nbytes + sum(value.nbytes for value in self.added.values())
        return own + (self.fast.nbytes if self.fast is not None else 0)


@dataclass(frozen=True, slots=True, eq=False)
class _StoredConstants:
    """An entry of the store. `owners` keeps the texts alive, so that no other tensor can take an id in the key."""

    owners: tuple[torch.Tensor, ...]
    version: int
    constants: BatchConstants


class ConstantsStore:
    """The latest batches' constants. Compute thread only. `version` must change whenever a weight of the UNet does."""

    def __init__(self, unet: Any, version: Callable[[], int], *, limit_bytes: int) -> None:
        self._unet = unet
        self._version = version
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[tuple[object, ...], _StoredConstants] = OrderedDict()
        self.hits = 0
        self.misses = 0

    @property
    def nbytes(self) -> int:
        """The bytes held by all entries."""
        return sum(entry.constants.nbytes for entry in self._entries.values())

    def of(self, conditionings: Sequence[Conditioning], layout: BatchLayout, *, fast: bool) -> BatchConstants:
        """Return the batch's constants, computed unless they are stored for these texts and the present weights."""
        key = (fast, layout.counts, tuple(id(conditioning.text) for conditioning in conditionings))
        version = self._version()
        entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            self.hits += 1
            self._entries.move_to_end(key)
            return entry.constants
        self.misses += 1
        constants = self._compute(conditionings, layout, fast=fast)
        self._keep(
            key, _StoredConstants(tuple(conditioning.text for conditioning in conditionings), version, constants)
        )
        return constants

    def _compute(self, conditionings: Sequence[Conditioning], layout: BatchLayout, *, fast: bool) -> BatchConstants:
        text = stack_conditionings([conditioning.text for conditioning in conditionings], layout)
        added = {
            name: stack_conditionings([conditioning.added[name] for conditioning in conditionings], layout)
            for name in conditionings[0].added
        }
        return BatchConstants(text, added, fast_text(self._unet, text) if fast else None)

    def _keep(self, key: tuple[object, ...], entry: _StoredConstants) -> None:
        """Store an entry after evicting stale ones, then the least recently used. One that alone is too large is not
        kept."""
        for old in [k for k, v in self._entries.items() if v.version != entry.version or k == key]:
            del self._entries[old]
        size = entry.constants.nbytes
        if size > self._limit_bytes:
            return
        while self._entries and (len(self._entries) >= _COMPOSITIONS or self.nbytes + size > self._limit_bytes):
            self._entries.popitem(last=False)
        self._entries[key] = entry
