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

from plait_kernels.devices import is_out_of_memory, synchronize
from plait_kernels.lora_merge import MergeOp, Term, is_finite
from plait_kernels.registry import load
from plait_serving.diffusion.errors import LoraError, OutOfMemory
from plait_serving.diffusion.lora.kinds import Factor, merged_in_turn
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.lora.targets import ModuleRef, layers_of, live_parameter
from plait_serving.diffusion.values import LoraSet

_log = logging.getLogger(__name__)

Recipe = tuple[tuple[Hashable, float], ...]
"""What is merged into one weight: (file token, scale) in set order. Equal recipes give equal bits."""

_NEWEST = 0.3
"""Weight of the newest switch in what one is expected to take."""
_FIRST_GUESS_S = {True: 1.0, False: 0.1}
"""Of merging a set, and of restoring the bare model, on a slow CPU."""


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
    factors: tuple[tuple[Factor, float], ...]


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
        self._switch_s: dict[bool, float] = {}

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

    def forget(self) -> None:
        """Restore the bare model and drop the pristine copies: the weights are about to be given back."""
        self.switch((), {})
        self._pristine.clear()

    def switch_cost_s(self, target: LoraSet) -> float:
        """Return the expected seconds of `switch`: what merging a set took lately, or restoring the bare model; 0 for
        the current set."""
        if target == self.current:
            return 0.0
        return self._switch_s.get(bool(target), _FIRST_GUESS_S[bool(target)])

    # ---- before the first write ---------------------------------------------------------------------------------

    def _plan(self, target: LoraSet, weights: Mapping[str, LoadedLora]) -> list[_Rewrite]:
        """Return the weights whose recipe changes, after taking pristine copies of them."""
        factors: dict[ModuleRef, list[tuple[Factor, float]]] = {}
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

    def _check_fits(self, name: str, ref: ModuleRef, factor: Factor) -> None:
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
            if rewrite.factors and not is_finite(merged_in_turn(pristine.copy, rewrite.factors)):
                raise LoraError(f"{rewrite.ref} would hold NaN or infinity with this LoRA set", param="loras")

    # ---- writing ------------------------------------------------------------------------------------------------

    def _write(self, rewrites: list[_Rewrite]) -> None:
        started_s = self._clock()
        try:
            for rewrite in rewrites:
                self._rewrite(rewrite)
            synchronize(rewrites[0].weight.device)
        except BaseException as error:
            self._fall_back()
            if is_out_of_memory(error):
                raise OutOfMemory("the LoRA set does not fit the device", param="loras") from error
            raise
        seconds, merges = self._clock() - started_s, bool(self._live)
        average_s = self._switch_s.get(merges, seconds)
        self._switch_s[merges] = average_s + _NEWEST * (seconds - average_s)

    def _rewrite(self, rewrite: _Rewrite) -> None:
        pristine, terms = self._pristine[rewrite.ref].copy, _terms(rewrite)
        if terms is None:
            rewrite.weight.copy_(merged_in_turn(pristine, rewrite.factors))
        else:
            op: MergeOp = load("lora_merge", rewrite.weight.device.type, rewrite.weight.dtype)
            op(rewrite.weight, pristine, terms)
        if rewrite.recipe:
            self._live[rewrite.ref] = rewrite.recipe
        else:
            self._live.pop(rewrite.ref, None)

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


def _largest(weight: torch.Tensor) -> float:
    """Return the max absolute value; NaN propagates."""
    low, high = torch.aminmax(weight)
    return float(torch.maximum(low.abs(), high.abs()))


def _terms(rewrite: _Rewrite) -> list[Term] | None:
    """Return what the merge kernel takes; None: not all of the set are plain LoRAs."""
    terms = [Term(up=plain[0], down=plain[1], c=c) for it, c in rewrite.factors if (plain := it.plain)]
    return terms if len(terms) == len(rewrite.factors) else None
