"""LoRA sets as row-wise factors: what the rows of a batch add to the layers of the model that steps.

A set of several LoRAs is their factors side by side: A = [A1 | A2], B = [c1 B1; c2 B2] with c = scale * alpha / r.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

from plait_kernels.executors import AdaptedLayer, Factors, RowFactors
from plait_serving.diffusion.families.rows import BatchLayout
from plait_serving.diffusion.lora.kinds import Factor
from plait_serving.diffusion.lora.parse import LoadedLora

LoadedSet: TypeAlias = tuple[tuple[LoadedLora, float], ...]
"""The files of a LoRA set with their scales, in set order."""

PerProgram: TypeAlias = tuple[RowFactors | None, ...]
"""The factors of a batch for each program: of its own layers only; None where no row has any."""

SetKey: TypeAlias = tuple[tuple[Hashable, float], ...]
"""A set's files, by token, with their scales."""

Pairs: TypeAlias = Mapping[str, Factors]
"""One set's A and B of each layer, without rows."""

Ranks: TypeAlias = Mapping[str, int]
"""The rank of each layer that has factors."""

_RANK_STEP = 8  # ranks are padded to multiples, so that few shapes occur
_MAX_EXCESS = 1.5  # how much more a mixed batch computes so that it has a shape of earlier ones
_KEPT_BATCHES, _KEPT_SETS, _KEPT_FILES = 4, 64, 1024
_KEPT_BYTES = 256 << 20
"""Of all batches, or sets, but the latest: sixteen images of sets of their own can hold more."""

_V = TypeVar("_V")


class Kept(Generic[_V]):
    """The latest values by key: so many at most, and so many bytes of all but the newest. Thread-safe: what is known
    waits for nobody who makes another."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[object, ...], tuple[_V, int]] = OrderedDict()

    def get(self, key: tuple[object, ...], make: Callable[[], tuple[_V, int]]) -> _V:
        """Return the value of a key; `make` returns it with its bytes."""
        with self._lock:
            found = self._found.pop(key, None)
            if found is not None:
                self._found[key] = found
                return found[0]
            while (
                len(self._found) >= self._max_count or sum(size for _, size in self._found.values()) > self._max_bytes
            ):
                self._found.popitem(last=False)
        found = make()
        with self._lock:
            self._found[key] = found
        return found[0]


class FactorStore:
    """Builds the factors of a batch and remembers the latest ones. Compute thread only."""

    def __init__(
        self,
        component: str,
        *programs: Sequence[AdaptedLayer],
        kept_bytes: int = _KEPT_BYTES,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take each program's adapted layers, all of one component; their paths are those of `ModuleRef`s as text.
        `dtype` and `device`: of the factors."""
        self._dtype, self._device = dtype, device
        self._component = component
        self._programs = [frozenset(layer.path for layer in layers) for layers in programs]
        self._layers = {layer.path: layer for layers in programs for layer in layers}
        self._taken: Kept[bool] = Kept(_KEPT_FILES, kept_bytes)
        self._widest: Ranks = {}
        self._batches: Kept[PerProgram] = Kept(_KEPT_BATCHES, kept_bytes)
        self._sets: Kept[Pairs] = Kept(_KEPT_SETS, kept_bytes)

    def takes(self, weights: LoadedLora) -> bool:
        """Return whether every layer of the component that a file changes is adapted, by factors that can be inputs."""
        own = ((ref, factor) for ref, factor in weights.factors.items() if ref.component == self._component)
        return self._taken.get(
            (weights.token,),
            lambda: (all(str(ref) in self._layers and factor.row_rank is not None for ref, factor in own), 0),
        )

    def of(self, sets: Sequence[LoadedSet], layout: BatchLayout) -> PerProgram:
        """Return the factors of a batch of requests with these sets."""
        if not any(sets):
            return (None,) * len(self._programs)
        key = (layout.counts, layout.branches, *map(_key, sets))
        return self._batches.get(key, lambda: self._build(sets, layout))

    def _build(self, sets: Sequence[LoadedSet], layout: BatchLayout) -> tuple[PerProgram, int]:
        """Return the factors of a batch, and their bytes."""
        distinct = list({_key(one): one for one in sets}.values())
        ranks = _padded([self._ranks(one) for one in distinct])
        if len(distinct) == 1:
            rows_of = [_key(sets[0])]
        else:
            ranks = self._widest = self._wide(ranks)
            rows_of = [_key(sets[k]) for k, _ in layout.blocks for _ in range(layout.counts[k])]
        pairs = {_key(one): self._pairs_of(one, ranks) for one in distinct}
        by_path = {path: _stacked([pairs[key][path] for key in rows_of]) for path in ranks}
        parts = ({path: pair for path, pair in by_path.items() if path in own} for own in self._programs)
        factors = tuple(RowFactors(rows=layout.size, by_path=part) if part else None for part in parts)
        return factors, self._dtype.itemsize * len(rows_of) * self._numbers(ranks)

    def _wide(self, ranks: Ranks) -> Ranks:
        """Return ranks that hold these and those of earlier mixed batches, so that few shapes occur; just these where
        that would be much more to compute."""
        paths = dict.fromkeys([*self._widest, *ranks])
        joined = {path: max(self._widest.get(path, 0), ranks.get(path, 0)) for path in paths}
        return joined if self._numbers(joined) <= _MAX_EXCESS * self._numbers(ranks) else ranks

    def _numbers(self, ranks: Ranks) -> int:
        """Return how many numbers one row's factors are."""
        return sum(rank * (self._layers[path].width_in + self._layers[path].width_out) for path, rank in ranks.items())

    def _pairs_of(self, one: LoadedSet, ranks: Ranks) -> Pairs:
        """Return a set's A `(in, r)` and B `(r, out)` of each layer; zeros where the set has nothing."""

        def make() -> tuple[Pairs, int]:
            terms = self._by_path(one)
            pairs = {path: self._pair(path, terms.get(path, ()), rank) for path, rank in ranks.items()}
            return pairs, self._dtype.itemsize * self._numbers(ranks)

        return self._sets.get((_key(one), tuple(ranks.items())), make)

    def _by_path(self, one: LoadedSet) -> Mapping[str, list[tuple[Factor, float]]]:
        terms: dict[str, list[tuple[Factor, float]]] = {}
        for weights, scale in one:
            if scale == 0.0:
                continue
            for ref, factor in weights.factors.items():
                if ref.component == self._component:
                    terms.setdefault(str(ref), []).append((factor, scale * factor.alpha / factor.rank))
        return terms

    def _pair(self, path: str, terms: Sequence[tuple[Factor, float]], rank: int) -> Factors:
        layer, start = self._layers[path], 0
        first, second = torch.zeros(layer.width_in, rank), torch.zeros(rank, layer.width_out)
        for factor, c in terms:
            down, up = factor.pair()
            part = slice(start, start + len(down))
            first[:, part] = down.T
            torch.mul(up.to(torch.float32).T, c, out=second[part])
            start += len(down)
        return first.to(self._device, self._dtype), second.to(self._device, self._dtype)

    def _ranks(self, one: LoadedSet) -> Ranks:
        return {path: sum(factor.row_rank or 0 for factor, _ in terms) for path, terms in self._by_path(one).items()}


def _key(one: LoadedSet) -> SetKey:
    return tuple((file.token, scale) for file, scale in one)


def _padded(ranks: Sequence[Ranks]) -> Ranks:
    """Return the largest of each layer's ranks, padded."""
    paths = dict.fromkeys(path for one in ranks for path in one)
    return {path: -(-max(one.get(path, 0) for one in ranks) // _RANK_STEP) * _RANK_STEP for path in paths}


def _stacked(pairs: Sequence[Factors]) -> Factors:
    return torch.stack([first for first, _ in pairs]), torch.stack([second for _, second in pairs])
