"""One module's tensors of a file, and the factor that they make, if they fit the module's weight.

Errors name the tensor's key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.keys import TensorRole
from plait_serving.diffusion.lora.kinds import Factor, FileMatrix
from plait_serving.diffusion.lora.metadata import AlphaRules
from plait_serving.diffusion.lora.targets import ModuleRef

Keys = Mapping[TensorRole, str]
Tensors = Mapping[TensorRole, torch.Tensor]

_MAX_RANK = 4096
_WIDTHS = {1536: "Stable Diffusion 3 Medium or 3.5 Medium", 2432: "Stable Diffusion 3.5 Large", 3072: "FLUX.1"}
_INPUTS = {2: "FLUX.1 Canny or Depth, a control LoRA", 6: "FLUX.1 Fill"}  # by times the channels of FLUX.1


class _Names(NamedTuple):
    """The tensors that make one of the two matrices."""

    whole: TensorRole | None
    left: TensorRole
    right: TensorRole
    core: TensorRole | None


_LORA = (_Names(None, TensorRole.UP, TensorRole.DOWN, None),)
_LOHA = (
    _Names(None, TensorRole.HADA_W1_A, TensorRole.HADA_W1_B, TensorRole.HADA_T1),
    _Names(None, TensorRole.HADA_W2_A, TensorRole.HADA_W2_B, TensorRole.HADA_T2),
)
_LOKR = (
    _Names(TensorRole.LOKR_W1, TensorRole.LOKR_W1_A, TensorRole.LOKR_W1_B, None),
    _Names(TensorRole.LOKR_W2, TensorRole.LOKR_W2_A, TensorRole.LOKR_W2_B, TensorRole.LOKR_T2),
)
_KINDS = tuple(
    (kind, frozenset(role for names in kind for role in names if role is not None)) for kind in (_LORA, _LOHA, _LOKR)
)
_BESIDE = frozenset({TensorRole.ALPHA, TensorRole.MAGNITUDE, TensorRole.DORA_SCALE})


def factor(ref: ModuleRef, keys: Keys, tensors: Tensors, base: tuple[int, ...], rules: AlphaRules) -> Factor:
    """Return what a module's tensors make. Raises `LoraError` if that is no weight (or bias) of the shape `base`, and
    for numbers that are no weights."""
    if TensorRole.ALPHA in keys and tensors[TensorRole.ALPHA].numel() != 1:
        raise LoraError(f"{keys[TensorRole.ALPHA]} is not one number")
    if TensorRole.DIFFERENCE in keys:
        return _difference(ref, keys, tensors, base)
    roles = keys.keys() - _BESIDE
    kind, own = next((each for each in _KINDS if roles & each[1]), _KINDS[0])
    _only(roles, own, keys)
    if kind is _LORA:
        _check_lora(ref, keys, tensors, base)
    else:
        for names in kind:
            _check_matrix(ref, keys, tensors, names, base[2:])
    found = _product(ref, kind, tensors, rules)
    made = {found.first.shape, found.second.shape} if kind is _LOHA and found.second is not None else {found.shape}
    if made != {(base[0], math.prod(base[1:]))}:
        listed = ", ".join(f"{keys[role]} {_shape(tensors[role])}" for role in sorted(roles, key=str))
        raise LoraError(f"{ref}: {listed} do not make a weight of {base}")
    return _decomposed(ref, keys, tensors, base, found, is_dora=rules.decomposes(ref))


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def _check_lora(ref: ModuleRef, keys: Keys, tensors: Tensors, base: tuple[int, ...]) -> None:
    missing = [role.name.lower() for role in (TensorRole.DOWN, TensorRole.UP) if role not in keys]
    if missing:
        raise LoraError(f"{ref} has no {' and no '.join(missing)} factor, but {', '.join(keys.values())}")
    down, up = _shape(tensors[TensorRole.DOWN]), _shape(tensors[TensorRole.UP])
    rank = down[0] if down else 0
    kernel = base[2:]
    fits_down = down[1:] == base[1:] or (math.prod(kernel) == 1 and _without_ones(down) == (rank, base[1]))
    fits_up = _without_ones(up) == (base[0], rank)
    if rank < 1 or rank > _MAX_RANK or not fits_down or not fits_up:
        of = _made_for(ref, down, base)
        other = "" if of is None else f"; the file is for {of}"
        raise LoraError(f"{ref}: factors {down} and {up} do not make a weight of {base}{other}")


def _made_for(ref: ModuleRef, down: tuple[int, ...], base: tuple[int, ...]) -> str | None:
    """Return the model for which a factor of that shape was made, where names are the same and widths tell."""
    if len(down) != 2 or len(base) != 2:
        return None
    if ref.module == "x_embedder":
        return _INPUTS.get(down[1] // base[1])
    return _WIDTHS.get(down[1]) if base[1] in _WIDTHS and down[1] != base[1] else None


def _difference(ref: ModuleRef, keys: Keys, tensors: Tensors, base: tuple[int, ...]) -> Factor:
    """Return what adds a tensor as it is."""
    _only(keys, {TensorRole.DIFFERENCE}, keys)
    tensor = tensors[TensorRole.DIFFERENCE]
    if _shape(tensor) != base:
        raise LoraError(f"{keys[TensorRole.DIFFERENCE]} has the shape {_shape(tensor)}, but {ref} has {base}")
    whole = FileMatrix(right=tensor.reshape(len(tensor), -1))
    return Factor(first=whole, alpha=1.0, rank=1, bound=_largest(ref, tensor))


# ---- LoHa and LoKr --------------------------------------------------------------------------------------------------


def _check_matrix(ref: ModuleRef, keys: Keys, tensors: Tensors, names: _Names, kernel: tuple[int, ...]) -> None:
    """Raise `LoraError` if one of the two matrices is not complete, or its parts do not fit each other."""
    shapes = {role: _shape(tensors[role]) for role in names if role is not None and role in tensors}
    _complete(ref, names, shapes.keys(), keys)
    whole, left, right, core = names
    for role, shape in shapes.items():
        if len(shape) not in {2, 4} or min(shape) < 1 or (len(shape) == 4 and shape[2:] not in {kernel, (1, 1)}):
            raise LoraError(f"{keys[role]} has the shape {shape}, which is no part of a weight")
    if whole is not None and whole in shapes:
        return
    outer, inner = shapes[left], shapes[right]
    if core is not None and core in shapes:
        if len(outer) != 2 or len(inner) != 2 or shapes[core][:2] != (outer[0], inner[0]) or outer[0] > _MAX_RANK:
            raise LoraError(f"{keys[core]} {shapes[core]} does not fit {keys[left]} {outer} and {keys[right]} {inner}")
    elif _without_ones(outer)[1:] != inner[:1] or inner[0] > _MAX_RANK:
        raise LoraError(f"{keys[left]} {outer} and {keys[right]} {inner} have no product")


def _complete(ref: ModuleRef, names: _Names, found: Collection[TensorRole], keys: Keys) -> None:
    """Raise `LoraError` if a matrix is neither whole nor a product."""
    if names.whole is not None and names.whole in found:
        surplus = sorted(keys[role] for role in found if role is not names.whole)
        if surplus:
            raise LoraError(f"{ref}: {', '.join(surplus)} beside {keys[names.whole]}, which is the whole matrix")
        return
    missing = [role.name.lower() for role in (names.left, names.right) if role not in found]
    if missing:
        raise LoraError(f"{ref} has no {' and no '.join(missing)}, but {', '.join(sorted(keys.values()))}")


def _product(ref: ModuleRef, kind: tuple[_Names, ...], tensors: Tensors, rules: AlphaRules) -> Factor:
    first, *others = (_matrix(tensors, names) for names in kind)
    # What alpha is divided by. Where both matrices are whole, LyCORIS does not divide; PEFT takes its configured rank.
    rank = next((matrix.right.shape[0] for matrix in (*others, first) if matrix.left is not None), None)
    rank = rules.rank(ref) if rank is None else rank
    alpha, rank = (1.0, 1) if rank is None else (_alpha(ref, tensors, rank, rules), rank)
    return Factor(
        first=first,
        second=others[0] if others else None,
        is_kronecker=kind is _LOKR,
        alpha=alpha,
        rank=rank,
        bound=math.prod(_matrix_bound(ref, matrix) for matrix in (first, *others)),
    )


def _matrix(tensors: Tensors, names: _Names) -> FileMatrix:
    if names.whole is not None and names.whole in tensors:
        return FileMatrix(right=tensors[names.whole])
    core = None if names.core is None else tensors.get(names.core)
    return FileMatrix(right=tensors[names.right], left=tensors[names.left].flatten(1), core=core)


def _matrix_bound(ref: ModuleRef, matrix: FileMatrix) -> float:
    """Return at least every absolute number of the matrix."""
    if matrix.left is None:
        return _largest(ref, matrix.right)
    if matrix.core is None:
        return _bound(ref, matrix.left, matrix.right.flatten(1))
    numbers = matrix.core.numel()
    return _largest(ref, matrix.core) * math.sqrt(numbers) * _bound(ref, matrix.left.T, matrix.right)


# ---- DoRA and alpha -------------------------------------------------------------------------------------------------


def _decomposed(
    ref: ModuleRef, keys: Keys, tensors: Tensors, base: tuple[int, ...], found: Factor, *, is_dora: bool
) -> Factor:
    """Return a factor with the magnitude of a DoRA, if there is one, as there must be if it `is_dora`."""
    roles = [role for role in (TensorRole.MAGNITUDE, TensorRole.DORA_SCALE) if role in keys]
    if len(roles) > 1:
        raise LoraError(f"{ref}: {keys[roles[0]]} and {keys[roles[1]]} both are its magnitude")
    if not roles:
        if is_dora:
            raise LoraError(f"its metadata says use_dora, but {ref} has no magnitude")
        return found
    magnitude, shape = tensors[roles[0]], _shape(tensors[roles[0]])
    # A `dora_scale` `(1, i, ...)` has a number for each input channel; `(o, 1, ...)` has one for each row.
    by_input = roles[0] is TensorRole.DORA_SCALE and len(shape) > 1 and shape[0] != base[0]
    if math.prod(shape) != base[int(by_input)] or sum(size > 1 for size in shape) > 1:
        raise LoraError(f"{keys[roles[0]]} has the shape {shape}, which is no magnitude of a weight of {base}")
    _largest(ref, magnitude)
    return replace(found, magnitude=magnitude.flatten(), by_input=by_input, bound=math.inf)


def _alpha(ref: ModuleRef, tensors: Tensors, rank: int, rules: AlphaRules) -> float:
    given = tensors.get(TensorRole.ALPHA)
    alpha = rules.alpha(ref, rank) if given is None else float(given.item())
    if not math.isfinite(alpha) or alpha == 0.0:
        raise LoraError(f"{ref} has alpha {alpha}")
    return alpha


def _only(roles: Collection[TensorRole], kind: Collection[TensorRole], keys: Keys) -> None:
    others = [keys[role] for role in roles if role not in kind]
    if others:
        mine = next(keys[role] for role in roles if role in kind)
        raise LoraError(f"{mine} and {others[0]} are of two kinds of LoRA")


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Squeeze `(o, r, 1, 1)` to `(o, r)`; leave other shapes unchanged."""
    return shape[:2] if len(shape) == 4 and shape[2:] == (1, 1) else shape


def _bound(ref: ModuleRef, up: torch.Tensor, down: torch.Tensor) -> float:
    """Return at least every number of `up @ down`, of rows of up times columns of down (Cauchy-Schwarz); infinite if
    fp32 cannot hold it. Raises `LoraError` for NaN or infinity in the factors."""
    bound = float(_max_norm(up, dim=1)) * float(_max_norm(down, dim=0))
    if math.isfinite(bound):
        return bound * 1.001  # the norms themselves were rounded
    if not (torch.isfinite(up).all() and torch.isfinite(down).all()):
        raise LoraError(f"{ref} holds NaN or infinity")
    return math.inf


def _largest(ref: ModuleRef, tensor: torch.Tensor) -> float:
    low, high = torch.aminmax(tensor)
    largest = max(abs(float(low)), abs(float(high)))
    if not math.isfinite(largest) or math.isnan(float(high)):
        raise LoraError(f"{ref} holds NaN or infinity")
    return largest


def _max_norm(matrix: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Return the max 2-norm of rows or columns; NaN and infinity propagate."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    return wide.square().sum(dim=dim).max().sqrt()  # ten times as fast on a CPU as vector_norm over columns
