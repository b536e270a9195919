"""What LoRAs may change in a model family: weights and biases, with every name that files have for their modules.

Instead of rewriting keys by pattern, all names of every module that exists are listed once (`key_formats`), and a key
is looked up: what is not in the tables matches nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from plait_serving.diffusion.lora.key_formats import Blocks, is_text, original_spellings, spellings
from plait_serving.diffusion.lora.kinds import Rows
from plait_serving.diffusion.published.original_names import original_layers

_LAYERS = (nn.Linear, nn.Conv2d, nn.Embedding, nn.GroupNorm, nn.LayerNorm)


class ModuleRef(NamedTuple):
    """A weight by component ("unet", "transformer", "text_encoder", ...) and dotted module path, or the bias beside it.
    A tuple: it is hashed often."""

    component: str
    module: str
    parameter: str = "weight"

    def __str__(self) -> str:
        own = "" if self.parameter == "weight" else f".{self.parameter}"
        return f"{self.component}.{self.module}{own}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraTargets:
    """The modules of a family. `shapes` are of the weights that a product of two matrices may be added to: `(o, i)` or
    `(o, i, kh, kw)`. `parameters` are of all that a difference of the same shape may be added to: these, biases `(o,)`,
    and the weights of norms.

    `names` maps all formats' spellings (with their component's prefix) to the modules. Some of these are layers of the
    original model that are several here: `joined` has, for each of their weights and biases, the parts with their rows.
    """

    shapes: Mapping[ModuleRef, tuple[int, ...]]
    parameters: Mapping[ModuleRef, tuple[int, ...]]
    names: Mapping[str, ModuleRef]
    joined: Mapping[ModuleRef, Mapping[ModuleRef, Rows]]

    @classmethod
    def of(cls, components: Mapping[str, nn.Module]) -> LoraTargets:
        """List the modules of `components`: the model that steps and text encoders, by their folders in diffusers."""
        shapes: dict[ModuleRef, tuple[int, ...]] = {}
        parameters: dict[ModuleRef, tuple[int, ...]] = {}
        for ref, module in layers_of(components):
            parameters[ref] = tuple(getattr(module, ref.parameter).shape)
            if ref.parameter == "weight" and _is_mergeable(module):
                shapes[ref] = parameters[ref]
        blocks = Blocks.of([ref.module for ref in parameters if not is_text(ref.component)])
        names: dict[str, ModuleRef] = {}
        for component, path in {(ref.component, ref.module): None for ref in parameters}:
            names |= dict.fromkeys(spellings(component, path, blocks), ModuleRef(component, path))
        joined: dict[ModuleRef, Mapping[ModuleRef, Rows]] = {}
        steps = next((component for component in components if not is_text(component)), "")
        for layer in original_layers([ref.module for ref in parameters if ref.component == steps]):
            mine = ModuleRef(steps, layer.modules[0])
            if len(layer.modules) > 1 or layer.halves_swapped:
                mine = ModuleRef(steps, layer.name)
                for parameter in ("weight", "bias"):
                    parts = [ModuleRef(steps, module, parameter) for module in layer.modules]
                    if all(part in parameters for part in parts):
                        whole = mine._replace(parameter=parameter)
                        joined[whole] = _rows(parts, parameters, halves_swapped=layer.halves_swapped)
                        rows = sum(parameters[part][0] for part in parts)
                        parameters[whole] = (rows, *parameters[parts[0]][1:])
                shapes[mine] = parameters[mine]
            for name in original_spellings(layer.name):
                names.setdefault(name, mine)
        return cls(
            shapes=MappingProxyType(shapes),
            parameters=MappingProxyType(parameters),
            names=MappingProxyType(names),
            joined=MappingProxyType(joined),
        )

    @property
    def denoiser(self) -> str:
        """The component that steps run."""
        return next(ref.component for ref in self.parameters if not is_text(ref.component))


def _rows(
    parts: Sequence[ModuleRef], parameters: Mapping[ModuleRef, tuple[int, ...]], *, halves_swapped: bool
) -> Mapping[ModuleRef, Rows]:
    """Return which rows of the layer that is made of `parts` each of them has."""
    ends = list(itertools.accumulate(parameters[part][0] for part in parts))
    if halves_swapped:
        half = ends[0] // 2
        return {parts[0]: ((half, ends[0]), (0, half))}
    return {part: ((start, end),) for part, start, end in zip(parts, [0, *ends], ends, strict=False)}


def layers_of(components: Mapping[str, nn.Module]) -> Iterator[tuple[ModuleRef, nn.Module]]:
    """Yield all that files may change, each with the module that holds it."""
    for component, root in components.items():
        for path, module in root.named_modules():
            if path and isinstance(module, _LAYERS):
                for parameter in ("weight", "bias"):
                    if getattr(module, parameter, None) is not None:
                        yield ModuleRef(component, path, parameter), module


def live_parameter(module: nn.Module, parameter: str) -> torch.Tensor:
    """Return the tensor that a merge writes: of a bias `(o,)`, and of a norm's weight, a view `(o, 1)`."""
    live = getattr(module, parameter)
    assert isinstance(live, torch.Tensor)
    return live.detach() if live.ndim > 1 else live.detach()[:, None]


def _is_mergeable(module: nn.Module) -> bool:
    """Return whether a product of two matrices can be added to its weight: not of norms and grouped convolutions."""
    return isinstance(module, nn.Linear | nn.Embedding) or (isinstance(module, nn.Conv2d) and module.groups == 1)
