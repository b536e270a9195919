"""LoRA sets as row-wise factors: what the rows of a batch add to the layers of the UNet.

A set of several LoRAs is their factors side by side: A = [A1 | A2], B = [c1 B1; c2 B2] with c = scale * alpha / r.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from plait_kernels.executors import AdaptedLayer, Factors, RowFactors
from plait_serving.diffusion.denoisers.batch import BatchLayout
from plait_serving.diffusion.lora.formats import Factor, LoadedLora
from plait_serving.diffusion.protocols import LoraWeights

LoadedSet: TypeAlias = tuple[tuple[LoraWeights, float], ...]
"""The files of a LoRA set with their scales, in set order."""

PerProgram: TypeAlias = tuple[RowFactors | None, ...]
"""The factors of a batch for each program: of its own layers only; None where no row has any."""

_RANK_STEP = 8  # ranks are padded to multiples, so that few shapes occur
_KEPT_BATCHES = 4
_KEPT_BYTES = 256 << 20  # of all but the latest batch: sixteen images of sets of their own can hold more
_COMPONENT = "unet"


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    factors: PerProgram
    owners: tuple[LoadedSet, ...]

    @property
    def nbytes(self) -> int:
        pairs = [pair for part in self.factors if part is not None for pair in part.by_path.values()]
        return sum(first.nbytes + second.nbytes for first, second in pairs)


class FactorStore:
    """Builds the factors of a batch and remembers the latest ones. Compute thread only."""

    def __init__(self, *programs: Sequence[AdaptedLayer]) -> None:
        """Take each program's adapted layers; their paths are those of `ModuleRef`s as text."""
        self._programs = [frozenset(layer.path for layer in layers) for layers in programs]
        self._layers = {layer.path: layer for layers in programs for layer in layers}
        self._taken: dict[int, bool] = {}
        self._known: OrderedDict[tuple[object, ...], _Stored] = OrderedDict()

    def takes(self, weights: LoraWeights) -> bool:
        """Return whether every UNet layer that a file changes is adapted."""
        if not isinstance(weights, LoadedLora):
            return False
        known = self._taken.get(weights.token)
        if known is None:
            refs = [ref for ref in weights.factors if ref.component == _COMPONENT]
            known = all(str(ref) in self._layers for ref in refs)
            self._taken[weights.token] = known
        return known

    def of(self, sets: Sequence[LoadedSet], layout: BatchLayout) -> PerProgram:
        """Return the factors of a batch of requests with these sets."""
        if not any(sets):
            return (None,) * len(self._programs)
        key = (layout.counts, layout.branches, *(tuple((_token(file), scale) for file, scale in one) for one in sets))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key].factors
        while len(self._known) >= _KEPT_BATCHES or sum(one.nbytes for one in self._known.values()) > _KEPT_BYTES:
            self._known.popitem(last=False)
        self._known[key] = _Stored(self._build(sets, layout), tuple(sets))
        return self._known[key].factors

    def _build(self, sets: Sequence[LoadedSet], layout: BatchLayout) -> PerProgram:
        rows = layout.images * layout.branches
        if all(one == sets[0] for one in sets):
            terms, whose = [_by_path(sets[0])], [[slice(0, 1)]]
        else:
            terms, whose = [_by_path(one) for one in sets], [layout.rows(k) for k in range(len(sets))]
        paths = dict.fromkeys(path for one in terms for path in one)
        stacked = {path: _stack(self._layers[path], [one.get(path, []) for one in terms], whose) for path in paths}
        parts = ({path: pair for path, pair in stacked.items() if path in own} for own in self._programs)
        return tuple(RowFactors(rows=rows, by_path=part) if part else None for part in parts)


def _token(weights: LoraWeights) -> int:
    assert isinstance(weights, LoadedLora)
    return weights.token


def _by_path(one: LoadedSet) -> Mapping[str, list[tuple[Factor, float]]]:
    terms: dict[str, list[tuple[Factor, float]]] = {}
    for weights, scale in one:
        assert isinstance(weights, LoadedLora)
        if scale == 0.0:
            continue
        for ref, factor in weights.factors.items():
            if ref.component == _COMPONENT:
                terms.setdefault(str(ref), []).append((factor, scale * factor.alpha / factor.rank))
    return terms


def _stack(
    layer: AdaptedLayer, terms: Sequence[Sequence[tuple[Factor, float]]], whose: Sequence[Sequence[slice]]
) -> Factors:
    """Return one layer's A and B: of each set the terms, in the rows that are its own."""
    rows = max(own.stop for rows in whose for own in rows)
    needed = max(sum(factor.rank for factor, _ in one) for one in terms)
    rank = -(-needed // _RANK_STEP) * _RANK_STEP
    first, second = torch.zeros(rows, layer.width_in, rank), torch.zeros(rows, rank, layer.width_out)
    for one, places in zip(terms, whose, strict=True):
        start = 0
        for factor, c in one:
            part = slice(start, start + factor.rank)
            down, up = factor.down.to(torch.float32).T, factor.up.to(torch.float32).T * c
            for own in places:
                first[own, :, part] = down
                second[own, part, :] = up
            start += factor.rank
    return first, second
