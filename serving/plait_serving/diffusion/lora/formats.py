"""Parsing a LoRA file: safetensors in, factors matched to a family's modules out. Nothing is dropped silently.

Every key is understood or the file is refused, with the offending keys in the message. Symbols as in
`plait_kernels.lora_merge`: per module A `(r, D)`, B `(o, r)`, and alpha; the merge adds `scale*alpha/r * B@A`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora import container
from plait_serving.diffusion.lora.keys import LoraFormat, TensorRole, meaning, reject_unsupported
from plait_serving.diffusion.lora.metadata import AlphaRules
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef

MAX_FILE_BYTES = 4 << 30
"""A rank-256 LoRA of every SDXL layer has some 1.7 GB."""

_LISTED = 8
_tokens = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factor:
    """One module's share of a LoRA. `down (r, D)` and `up (o, r)` in the file's dtype, finite, on the CPU.

    `bound` is at least every `abs((up @ down)[j, k])` (rows of up times columns of down, Cauchy-Schwarz), so whether
    a merge can overflow is known without doing it.
    """

    down: torch.Tensor
    up: torch.Tensor
    alpha: float
    bound: float

    @property
    def rank(self) -> int:
        """The rank r."""
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedLora:
    """A parsed LoRA file in host memory (`protocols.LoraWeights`). `token` is unique to every file ever parsed."""

    name: str
    format: LoraFormat
    factors: Mapping[ModuleRef, Factor]
    nbytes: int
    token: int = field(default_factory=lambda: next(_tokens))

    @property
    def touches_text_encoder(self) -> bool:
        """Whether it changes the prompt's encoding."""
        return any(ref.component != "unet" for ref in self.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPlan:
    """The modules of a header with their keys, all matched, shapes checked. No tensor was read."""

    format: LoraFormat
    parts: Mapping[ModuleRef, Mapping[TensorRole, str]]
    rules: AlphaRules


def parse(name: str, path: Path, targets: LoraTargets, *, max_bytes: int = MAX_FILE_BYTES) -> LoadedLora:
    """Read a whole file. Raises `LoraError` with a message that starts with the LoRA's name."""
    try:
        plan(container.inspect(path, max_bytes=max_bytes), targets)
        header, data = container.read(path, max_bytes=max_bytes)
        agreed = plan(header, targets)  # again, of the very bytes that were read
        factors = {
            ref: _factor(ref, {role: container.tensor(header, data, key) for role, key in roles.items()}, agreed.rules)
            for ref, roles in agreed.parts.items()
        }
    except LoraError as error:
        raise LoraError(f"LoRA {name!r}: {error.message}", param="loras") from error
    return LoadedLora(name=name, format=agreed.format, factors=MappingProxyType(factors), nbytes=len(data))


def plan(header: container.Header, targets: LoraTargets) -> LoraPlan:
    """Match every key of a header to a module. Raises `LoraError`."""
    keys = header.tensors.keys()
    if not keys:
        raise LoraError("the file holds no tensors")
    reject_unsupported(keys)
    found = {key: meaning(key, targets) for key in keys}
    unmatched = sorted(key for key, what in found.items() if what is None)
    if unmatched:
        raise LoraError(f"{len(unmatched)} of {len(keys)} keys match nothing in this model: {listed(unmatched)}")
    parts: dict[ModuleRef, dict[TensorRole, str]] = {}
    formats = set()
    for key, what in found.items():
        assert what is not None
        formats.add(what.format)
        roles = parts.setdefault(what.ref, {})
        if what.role in roles:
            raise LoraError(f"{roles[what.role]} and {key} both mean {what.ref}")
        roles[what.role] = key
    if len(formats) > 1:
        raise LoraError("the file mixes kohya and PEFT keys")
    for ref, roles in parts.items():
        _check_shapes(ref, roles, header, targets.shapes[ref])
    return LoraPlan(format=formats.pop(), parts=parts, rules=AlphaRules.of(header.metadata))


def listed(keys: Iterable[str]) -> str:
    """Return the first few keys, and the number of the others, as text."""
    keys = list(keys)
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return ", ".join(keys[:_LISTED]) + more


def _check_shapes(
    ref: ModuleRef, roles: Mapping[TensorRole, str], header: container.Header, base: tuple[int, ...]
) -> None:
    missing = [role.name.lower() for role in (TensorRole.DOWN, TensorRole.UP) if role not in roles]
    if missing:
        raise LoraError(f"{ref} has no {' and no '.join(missing)} factor")
    down, up = header.tensors[roles[TensorRole.DOWN]], header.tensors[roles[TensorRole.UP]]
    for role in (TensorRole.DOWN, TensorRole.UP):
        dtype = header.tensors[roles[role]].dtype
        if dtype not in container.DTYPES:
            raise LoraError(f"{roles[role]} is {dtype}; LoRA weights must be F16, BF16, F32 or F64")
    rank = down.shape[0] if down.shape else 0
    kernel = base[2:]
    fits_down = down.shape[1:] == base[1:] or (math.prod(kernel) == 1 and _without_ones(down.shape) == (rank, base[1]))
    fits_up = _without_ones(up.shape) == (base[0], rank)
    if rank < 1 or rank > 4096 or not fits_down or not fits_up:
        raise LoraError(f"{ref}: factors {down.shape} and {up.shape} do not make a weight of {base}")
    if TensorRole.ALPHA in roles and math.prod(header.tensors[roles[TensorRole.ALPHA]].shape) != 1:
        raise LoraError(f"{roles[TensorRole.ALPHA]} is not one number")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Squeeze `(o, r, 1, 1)` to `(o, r)`; leave other shapes unchanged."""
    return shape[:2] if len(shape) == 4 and shape[2:] == (1, 1) else shape


def _factor(ref: ModuleRef, tensors: Mapping[TensorRole, torch.Tensor], rules: AlphaRules) -> Factor:
    down, up = tensors[TensorRole.DOWN].flatten(1), tensors[TensorRole.UP].flatten(1)
    rank = down.shape[0]
    alpha = float(tensors[TensorRole.ALPHA].item()) if TensorRole.ALPHA in tensors else rules.alpha(ref, rank)
    if not math.isfinite(alpha) or alpha == 0.0:
        raise LoraError(f"{ref} has alpha {alpha}")
    return Factor(down=down, up=up, alpha=alpha, bound=_bound(ref, up, down))


def _bound(ref: ModuleRef, up: torch.Tensor, down: torch.Tensor) -> float:
    """Return `Factor.bound`, infinite if fp32 cannot hold it. Raises `LoraError` for NaN or infinity in the factors."""
    bound = float(_max_norm(up, dim=1)) * float(_max_norm(down, dim=0))
    if math.isfinite(bound):
        return bound * 1.001  # the norms themselves were rounded
    if not (torch.isfinite(up).all() and torch.isfinite(down).all()):
        raise LoraError(f"{ref} holds NaN or infinity")
    return math.inf


def _max_norm(matrix: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Return the max 2-norm of rows or columns; NaN and infinity propagate."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return wide.square().sum(dim=dim).max().sqrt()  # ten times as fast on a CPU as vector_norm over columns
