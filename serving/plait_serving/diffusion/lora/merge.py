"""Keeps live weights equal to W0 + the current LoRA set, in place. Compute thread only.

A switch is prepared in full before the first weight is written: factors are matched to modules, pristine copies are
taken, and finiteness is known from bounds (or, where a bound does not settle it, from a trial merge). After that
only running out of memory can fail; then the model falls back to its pristine weights, never to a mixture.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from plait_kernels.device_errors import is_out_of_memory
from plait_kernels.devices import synchronize
from plait_kernels.lora_merge import MergeOp, NonFiniteMerge, Term, is_finite
from plait_kernels.lora_merge.reference import merged
from plait_kernels.registry import load
from plait_serving.diffusion.errors import LoraError, OutOfMemory
from plait_serving.diffusion.lora.kinds import AnyFactor, Factor, merged_in_turn
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.lora.targets import ModuleRef, layers_of, live_parameter
from plait_serving.diffusion.values import LoraRef, LoraSet

_log = logging.getLogger(__name__)

Recipe = tuple[tuple[Hashable, float], ...]
"""What is merged into one weight: (file token, scale) in set order. Equal recipes give equal bits."""

# Weight of the newest measurement in the cost averages; first guesses are a slow CPU's, replaced by the first switch.
_NEWEST = 0.3
_FIRST_MERGE_S_PER_BYTE = 2e-9
_FIRST_RESTORE_S_PER_BYTE = 2e-10

_FILES_REMEMBERED = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Pristine:
    """A weight's own values, and the max of them."""

    copy: torch.Tensor
    largest: float


@dataclass(frozen=True, slots=True, eq=False)
class _Rewrite:
    """One weight to rewrite; no factors means restore."""

    ref: ModuleRef
    weight: torch.Tensor
    recipe: Recipe
    factors: tuple[tuple[AnyFactor, float], ...]


class Merger:
    """Keeps the weights of live modules equal to W0 + the current set. Compute thread only.

    `components` maps "unet", "text_encoder", "text_encoder_2", or some of them, to their live modules; what a set
    holds for others is left to their merger. `before_write` is called before weights are read or written. `current`:
    the set whose weights are live.
    """

    def __init__(
        self,
        components: Mapping[str, nn.Module],
        *,
        before_write: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._components = frozenset(components)
        self._modules = dict(layers_of(components))
        self._before_write = before_write
        self._clock = clock
        self.current: LoraSet = ()
        self._pristine: dict[ModuleRef, _Pristine] = {}
        self._live: dict[ModuleRef, Recipe] = {}
        self._touched: dict[tuple[str, Hashable], frozenset[ModuleRef]] = {}
        self._merge_s_per_byte: float | None = None
        self._restore_s_per_byte: float | None = None

    def switch(self, target: LoraSet, weights: Mapping[str, LoadedLora]) -> None:
        """Make `target` live; `()` restores the pristine weights bit for bit.

        After `LoraError` nothing was written. After `OutOfMemory` (or any other error) the bare model is live.
        """
        self._before_write()
        rewrites = self._plan(target, weights)
        self._check_finite(rewrites)
        if rewrites:
            self._write(rewrites)
        self.current = target
        self._remember({(lora.name, lora.file): self._own(weights[lora.name]) for lora in target})

    def forget(self) -> None:
        """Restore the bare model and drop the pristine copies: the weights are about to be given back."""
        self.switch((), {})
        self._pristine.clear()

    def switch_cost_s(self, target: LoraSet) -> float:
        """Return the expected seconds of `switch`, from measurements; 0 for the current set.

        A LoRA that was never merged is assumed to touch as much as the average one that was (or every weight).
        """
        if target == self.current:
            return 0.0
        wanted, had = self._touching(target), self._touching(self.current)
        unknown = sum((lora.name, lora.file) not in self._touched for lora in target)
        unknown_bytes = unknown * self._typical_bytes() if unknown else 0.0
        merge_bytes = sum(self._weight(ref).nbytes for ref, loras in wanted.items() if had.get(ref) != loras)
        restore_bytes = sum(self._weight(ref).nbytes for ref in had.keys() - wanted.keys())
        merge_rate = self._merge_s_per_byte or _FIRST_MERGE_S_PER_BYTE
        restore_rate = self._restore_s_per_byte or _FIRST_RESTORE_S_PER_BYTE
        return (merge_bytes + unknown_bytes) * merge_rate + restore_bytes * restore_rate

    # ---- before the first write ---------------------------------------------------------------------------------

    def _plan(self, target: LoraSet, weights: Mapping[str, LoadedLora]) -> list[_Rewrite]:
        """Return the weights whose recipe changes, after taking pristine copies of them."""
        factors: dict[ModuleRef, list[tuple[AnyFactor, float]]] = {}
        recipes: dict[ModuleRef, Recipe] = {}
        for lora in target:
            if lora.name not in weights:
                raise LoraError(f"LoRA {lora.name!r} was not loaded", param="loras")
            if not math.isfinite(lora.scale):
                raise LoraError(f"LoRA {lora.name!r}: its scale is not finite", param="loras")
            loaded = weights[lora.name]
            for ref, factor in loaded.factors.items():
                if lora.scale == 0.0 or ref.component not in self._components:
                    continue
                self._check_fits(lora.name, ref, factor)
                factors.setdefault(ref, []).append((factor, lora.scale * factor.alpha / factor.rank))
                recipes[ref] = (*recipes.get(ref, ()), (loaded.token, lora.scale))
        changed = [ref for ref in {**recipes, **self._live} if recipes.get(ref, ()) != self._live.get(ref, ())]
        for ref in changed:
            self._keep_pristine(ref)
        return [_Rewrite(ref, self._weight(ref), recipes.get(ref, ()), tuple(factors.get(ref, ()))) for ref in changed]

    def _check_fits(self, name: str, ref: ModuleRef, factor: AnyFactor) -> None:
        if ref not in self._modules:
            raise LoraError(f"LoRA {name!r} touches {ref}, which this model does not have", param="loras")
        weight = self._weight(ref)
        if factor.shape != (weight.shape[0], weight.shape[1:].numel()):
            raise LoraError(f"LoRA {name!r}: its factors for {ref} do not make a {tuple(weight.shape)}", param="loras")

    def _keep_pristine(self, ref: ModuleRef) -> None:
        if ref not in self._pristine:
            weight = self._weight(ref)
            try:
                copy = weight.clone()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise OutOfMemory("there is no memory for a pristine copy of a weight", param="loras") from error
            self._pristine[ref] = _Pristine(copy, _largest(copy))

    def _check_finite(self, rewrites: list[_Rewrite]) -> None:
        """Raise `LoraError` if a weight would turn NaN or infinite."""
        for rewrite in rewrites:
            pristine = self._pristine[rewrite.ref]
            bound = pristine.largest + sum(abs(c) * factor.bound for factor, c in rewrite.factors)
            if bound < 0.99 * torch.finfo(rewrite.weight.dtype).max:
                continue
            if rewrite.factors and not _stays_finite(rewrite, pristine.copy):
                raise LoraError(f"{rewrite.ref} would hold NaN or infinity with this LoRA set", param="loras")

    # ---- writing ------------------------------------------------------------------------------------------------

    def _write(self, rewrites: list[_Rewrite]) -> None:
        restores = [rewrite for rewrite in rewrites if not rewrite.factors]
        merges = [rewrite for rewrite in rewrites if rewrite.factors]
        try:
            restored_s = self._timed(restores)
            merged_s = self._timed(merges)
        except BaseException as error:
            self._fall_back()
            if is_out_of_memory(error):
                raise OutOfMemory("the LoRA set does not fit the device", param="loras") from error
            raise
        self._restore_s_per_byte = _average(self._restore_s_per_byte, restored_s, restores)
        self._merge_s_per_byte = _average(self._merge_s_per_byte, merged_s, merges)

    def _timed(self, rewrites: list[_Rewrite]) -> float:
        """Rewrite the weights of `rewrites`; return the seconds it took, device work included."""
        if not rewrites:
            return 0.0
        started_s = self._clock()
        for rewrite in rewrites:
            pristine, terms = self._pristine[rewrite.ref].copy, _terms(rewrite)
            if terms is None:
                rewrite.weight.copy_(merged_in_turn(pristine, rewrite.factors))
            else:
                op: MergeOp = load("lora_merge", rewrite.weight.device.type, rewrite.weight.dtype)
                op(rewrite.weight, pristine, terms, proven_finite=True)
            if rewrite.recipe:
                self._live[rewrite.ref] = rewrite.recipe
            else:
                self._live.pop(rewrite.ref, None)
        synchronize(rewrites[0].weight.device)
        return self._clock() - started_s

    def _fall_back(self) -> None:
        """Restore every weight that was ever touched; copying needs no memory."""
        _log.exception("merging a LoRA set failed half-way; the bare model is live again")
        for ref, pristine in self._pristine.items():
            self._weight(ref).copy_(pristine.copy)
        self._live.clear()
        self.current = ()

    def _weight(self, ref: ModuleRef) -> torch.Tensor:
        """Return the live weight. Asked for each time: weights may be given back and brought into memory again."""
        return live_parameter(self._modules[ref], ref.parameter)

    def _remember(self, touched: Mapping[tuple[str, Hashable], frozenset[ModuleRef]]) -> None:
        """Note what files touch; of the files of long ago nothing is known any more."""
        self._touched = {**{key: refs for key, refs in self._touched.items() if key not in touched}, **touched}
        for key in list(self._touched)[: -max(_FILES_REMEMBERED, len(touched))]:
            del self._touched[key]

    def _own(self, loaded: LoadedLora) -> frozenset[ModuleRef]:
        return frozenset(ref for ref in loaded.factors if ref.component in self._components)

    def _touching(self, loras: LoraSet) -> dict[ModuleRef, tuple[LoraRef, ...]]:
        """Return the files of a set that touch each weight, in set order, as far as it is known."""
        found: dict[ModuleRef, tuple[LoraRef, ...]] = {}
        for lora in loras:
            for ref in self._touched.get((lora.name, lora.file), ()):
                found[ref] = (*found.get(ref, ()), lora)
        return found

    def _typical_bytes(self) -> float:
        """Return the average bytes that a LoRA touches, over those seen."""
        if not self._touched:
            return float(sum(self._weight(ref).nbytes for ref in self._modules))
        sizes = [sum(self._weight(ref).nbytes for ref in refs) for refs in self._touched.values()]
        return sum(sizes) / len(sizes)


def _largest(weight: torch.Tensor) -> float:
    """Return the max absolute value; NaN propagates."""
    low, high = torch.aminmax(weight)
    return float(torch.maximum(low.abs(), high.abs()))


def _terms(rewrite: _Rewrite) -> list[Term] | None:
    """Return what the merge kernel takes; None: not all of the set are plain LoRAs."""
    plain = [(it, c) for it, c in rewrite.factors if isinstance(it, Factor) and it.magnitude is None]
    return [Term(up=it.up, down=it.down, c=c) for it, c in plain] if len(plain) == len(rewrite.factors) else None


def _stays_finite(rewrite: _Rewrite, pristine: torch.Tensor) -> bool:
    """Return whether a merge, tried aside, holds neither NaN nor infinity."""
    terms = _terms(rewrite)
    if terms is None:
        return is_finite(merged_in_turn(pristine, rewrite.factors))
    try:
        merged(pristine, terms)
    except NonFiniteMerge:
        return False
    return True


def _average(old: float | None, seconds: float, rewrites: list[_Rewrite]) -> float | None:
    total_bytes = sum(rewrite.weight.nbytes for rewrite in rewrites)
    if not total_bytes:
        return old
    newest = seconds / total_bytes
    return newest if old is None else old + _NEWEST * (newest - old)
