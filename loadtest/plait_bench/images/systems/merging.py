"""LoRA sets merged into a pipeline's weights in place, as a careful user of diffusers would write it.

It deliberately shares no code with our merge, so that equal images are evidence. W <- W0 + sum_i s_i * c_i * B_i @
A_i, with c_i = alpha_i / r_i and W0 a pristine copy; the sum is taken in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factors:
    """One LoRA's part in one weight: `down (r, in, ...)`, `up (out, r, ...)`, `c = alpha / r`."""

    weight: torch.nn.Parameter
    down: torch.Tensor
    up: torch.Tensor
    c: float

    def delta(self) -> torch.Tensor:
        """Compute `c * up @ down` in the weight's shape."""
        return self.c * (self.up.float().flatten(1) @ self.down.float().flatten(1)).reshape(self.weight.shape)


def read_factors(pipeline: Any, path: Path) -> list[Factors]:
    """Load a LoRA file through PEFT and copy the factors out of its layers; the pipeline is left unchanged."""
    from peft.tuners.lora import LoraLayer

    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="lora")
    found: list[Factors] = []
    for part in pipeline.components.values():
        layers = part.modules() if isinstance(part, torch.nn.Module) else ()
        found += [_factors(layer) for layer in layers if isinstance(layer, LoraLayer) and "lora" in layer.lora_A]
    pipeline.unload_lora_weights()
    return found


def _factors(layer: Any) -> Factors:
    """Return the factors of the adapter `lora` in one of PEFT's layers."""
    return Factors(
        weight=layer.get_base_layer().weight,
        down=layer.lora_A["lora"].weight.detach().clone(),
        up=layer.lora_B["lora"].weight.detach().clone(),
        c=float(layer.scaling["lora"]),
    )


class MergedLoras:
    """Keeps the weights equal to the pristine ones plus one set."""

    def __init__(self, loras: Mapping[str, Sequence[Factors]]) -> None:
        self._loras = loras
        touched = {id(factors.weight): factors.weight for lora in loras.values() for factors in lora}
        self._weights = touched
        self._pristine = {key: weight.detach().clone() for key, weight in touched.items()}
        self._live: tuple[tuple[str, float], ...] = ()

    @torch.no_grad()
    def switch(self, target: tuple[tuple[str, float], ...]) -> None:
        """Make `target` live; do nothing if it already is."""
        if target == self._live:
            return
        sums: dict[int, torch.Tensor] = {}
        for name, scale in target:
            for factors in self._loras[name]:
                key = id(factors.weight)
                sums[key] = sums.get(key, self._pristine[key].float()) + scale * factors.delta()
        for name, _ in self._live:
            for factors in self._loras[name]:
                sums.setdefault(id(factors.weight), self._pristine[id(factors.weight)])
        for key, value in sums.items():
            self._weights[key].copy_(value)
        self._live = target
