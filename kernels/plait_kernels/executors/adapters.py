"""A module's twin that computes in float32 and adds row-wise LoRA factors in its linear layers and convolutions.

The twin shares all parameters with the module, whatever their dtype: layers widen them when they compute, so weights
that are memory-mapped from a float16 file stay there. Its arithmetic is the definition of what a `Computation` and
`RowFactors` mean; executors that compile the twin are compared with it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from plait_kernels.executors import AdaptedLayer, Computation, ExecutorError, RowFactors


class Twin(nn.Module):
    """`twin(*inputs, *factors)` computes the module with the factors A, B of every layer of `layers`, in order."""

    def __init__(self, computation: Computation) -> None:
        """Raises `ExecutorError` for a layer that cannot be widened."""
        super().__init__()
        self._given: list[torch.Tensor] = []
        maker = _Maker(self._given, computation.takes_factors)
        self.module = maker.make(computation.module, "")
        self.layers = tuple(maker.found)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the module with the factors in the last `2 * len(layers)` tensors."""
        count = len(tensors) - 2 * len(self.layers)
        self._given[:] = tensors[count:]
        try:
            return tuple(self.module(*tensors[:count]))
        finally:
            self._given.clear()


def flat_factors(layers: Sequence[AdaptedLayer], factors: RowFactors | None) -> list[torch.Tensor]:
    """Return A, B for every layer in order; of rank 0 where a layer has none."""
    by_path, rows = (factors.by_path, factors.given) if factors is not None else ({}, 1)
    flat: list[torch.Tensor] = []
    for layer in layers:
        pair = by_path.get(layer.path)
        if pair is None:
            pair = torch.empty(rows, layer.width_in, 0), torch.empty(rows, 0, layer.width_out)
        flat.extend(pair)
    return flat


def check_factors(layers: Sequence[AdaptedLayer], rows: int, factors: RowFactors | None) -> None:
    """Raise `ExecutorError` for factors of other rows or of layers that take none."""
    if factors is None:
        return
    if factors.rows != rows:
        raise ExecutorError(f"factors for {factors.rows} rows were given to a call of {rows}")
    unknown = factors.by_path.keys() - {layer.path for layer in layers}
    if unknown:
        raise ExecutorError(f"{sorted(unknown)[0]} takes no factors")


def adapted_layer(path: str, module: nn.Module) -> AdaptedLayer | None:
    """Return what a layer needs to take factors, or None if it cannot."""
    if isinstance(module, nn.Linear):
        return AdaptedLayer(path=path, width_in=module.in_features, width_out=module.out_features)
    if isinstance(module, nn.Conv2d) and _is_plain(module):
        width_in = module.in_channels * math.prod(module.kernel_size)
        return AdaptedLayer(path=path, width_in=width_in, width_out=module.out_channels)
    return None


def _is_plain(module: nn.Conv2d) -> bool:
    """Return whether every output pixel is a product with a window of the input, with zeros around it."""
    padded_with_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return padded_with_zeros and module.groups == 1 and module.dilation == (1, 1)


class _Maker:
    """Copies the containers of a module and replaces the layers that must be."""

    def __init__(self, given: list[torch.Tensor], adapts: bool) -> None:
        self.found: list[AdaptedLayer] = []
        self._given = given
        self._adapts = adapts

    def make(self, module: nn.Module, path: str) -> nn.Module:
        """Return the twin of the module called `path`."""
        layer = adapted_layer(path, module) if self._adapts else None
        if layer is not None:
            place = 2 * len(self.found)
            self.found.append(layer)
            kind = _AdaptedLinear if isinstance(module, nn.Linear) else _AdaptedConvolution
            return kind(module, self._given, place)
        if any(own.dtype != torch.float32 for own in module._parameters.values() if own is not None):
            return _widened(path, module)
        if not module._modules:
            return module
        clone = copy.copy(module)
        clone.__dict__["_modules"] = {
            name: child if child is None else self.make(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
        }
        return clone


def _widened(path: str, module: nn.Module) -> nn.Module:
    for kind, compute in _WIDE.items():
        if isinstance(module, kind):
            return _WideLayer(module, compute)
    raise ExecutorError(f"{path}: a {type(module).__name__} cannot be computed in float32 from other weights")


def _wide(value: Any) -> Any:
    return None if value is None else value.to(torch.float32)


class _WideLayer(nn.Module):
    """A layer that widens its weights when it computes."""

    def __init__(self, layer: nn.Module, compute: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._compute = compute

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return self._compute(self.layer, x)


def _convolve(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight.to(torch.float32), _wide(layer.bias)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)


_WIDE: Mapping[type[nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]] = {
    nn.Linear: lambda layer, x: F.linear(x, _wide(layer.weight), _wide(layer.bias)),
    nn.Conv2d: _convolve,
    nn.GroupNorm: lambda layer, x: F.group_norm(x, layer.num_groups, _wide(layer.weight), _wide(layer.bias), layer.eps),
    nn.LayerNorm: lambda layer, x: F.layer_norm(
        x, layer.normalized_shape, _wide(layer.weight), _wide(layer.bias), layer.eps
    ),
}


class _AdaptedLayer(nn.Module):
    """A layer's parameters, and where its factors are among those of a call."""

    def __init__(self, layer: Any, given: list[torch.Tensor], place: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._given = given
        self._place = place

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B. No property: tracing reads those, when none are given."""
        return self._given[self._place], self._given[self._place + 1]

    def _adds_nothing(self) -> bool:
        """Return whether the factors have no rank. A trace must hold the sum, whatever rank its example has."""
        return not _is_tracing() and not self._factors()[0].shape[2]


class _AdaptedLinear(_AdaptedLayer):
    """`layer(x) + x @ A @ B` for x `(R, S, in)` or `(R, in)`."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        plain = F.linear(x, _wide(self.weight), _wide(self.bias))
        if self._adds_nothing():
            return plain
        first, second = self._factors()
        if not _is_tracing():
            return plus_factors(plain, x, first, second)
        rows = x.unsqueeze(1) if x.ndim == 2 else x
        added = rows @ first @ second
        return plain + (added.squeeze(1) if x.ndim == 2 else added)


class _AdaptedConvolution(_AdaptedLayer):
    """`layer(x) + unfold(x) @ A @ B` for x `(R, in, h, w)`, as `(layer with the kernels A)(x) @ B`.

    The windows are never made: a window's product with A is a sum over its kh * kw places, and each place's product is
    made for all pixels at once, then added where the window reaches it.
    """

    def __init__(self, layer: Any, given: list[torch.Tensor], place: int) -> None:
        super().__init__(layer, given, place)
        self._kernel, self._stride, self._padding = layer.kernel_size, layer.stride, layer.padding

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        plain = F.conv2d(x, _wide(self.weight), _wide(self.bias), self._stride, self._padding)
        if self._adds_nothing():
            return plain
        first, second = self._factors()
        reduced = self._reduced(x, first)
        if not _is_tracing():
            pixels = plain.flatten(2).transpose(1, 2)
            return _plus_product(pixels, reduced, second).transpose(1, 2).reshape(plain.shape)
        return plain + (reduced @ second).transpose(1, 2).reshape(plain.shape)

    def _reduced(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Return `unfold(x) @ A`, `(R, h' * w', r)`."""
        (rows, width, high, wide), rank, (kh, kw) = x.shape, first.shape[2], self._kernel
        places = x.flatten(2).transpose(1, 2) @ first.reshape(first.shape[0], width, kh * kw * rank)
        if self._kernel == (1, 1) and self._stride == (1, 1) and self._padding == (0, 0):
            return places
        (ph, pw), (sh, sw) = self._padding, self._stride
        grid = places.reshape(rows, high, wide, kh * kw * rank)
        grid = F.pad(grid, (0, 0, pw, pw, ph, ph)).reshape(rows, high + 2 * ph, wide + 2 * pw, kh, kw, rank)
        lines = _sum([part[:, :, j : _end(j, kw) : sw] for j, part in enumerate(grid.unbind(4))])
        sums = _sum([part[:, i : _end(i, kh) : sh] for i, part in enumerate(lines.unbind(3))])
        return sums.reshape(rows, sums.shape[1] * sums.shape[2], rank)


def _is_tracing() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def plus_factors(plain: torch.Tensor, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's output `plain (R, ..., out)` for x `(R, S, in)` or `(R, in)` with `x @ A @ B` added: A
    `(R | 1, in, r)`, B `(R | 1, r, out)`."""
    rows = x.unsqueeze(1) if x.ndim == 2 else x
    return _plus_product(plain.view(*rows.shape[:2], -1), rows @ _row(first), second).view_as(plain)


def _row(factor: torch.Tensor) -> torch.Tensor:
    """Return the only row of a factor `(1, ...)`, so that all rows of the other operand are one product."""
    return factor[0] if len(factor) == 1 else factor


def _plus_product(plain: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `plain + left @ right` in one pass over the plain part: plain `(R, S, out)`, left `(R, S, r)`, right
    `(R | 1, r, out)`."""
    return torch.baddbmm(plain, left, right.expand(len(left), -1, -1))


def _end(place: int, size: int) -> int | None:
    """Return where the pixels that windows have at one of `size` places end, counted from the end."""
    return place + 1 - size or None


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)
