"""One module's tensors of a file: whether they fit the module's weight, and the factor that they make.

Errors name the tensor's key.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora import container
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
_LORA_ROLES = frozenset({TensorRole.DOWN, TensorRole.UP})
_LOHA_ROLES = frozenset(role for names in _LOHA for role in names if role is not None)
_LOKR_ROLES = frozenset(role for names in _LOKR for role in names if role is not None)
_BESIDE = frozenset({TensorRole.ALPHA, TensorRole.MAGNITUDE, TensorRole.DORA_SCALE})


def check(ref: ModuleRef, keys: Keys, header: container.Header, base: tuple[int, ...], rules: AlphaRules) -> None:
    """Raise `LoraError` if a module's tensors do not make a weight (or bias) of the shape `base`. Reads no tensor."""
    for role, key in keys.items():
        dtype = header.tensors[key].dtype
        if role is not TensorRole.ALPHA and dtype not in container.DTYPES:
            raise LoraError(f"{key} is {dtype}; LoRA weights must be F16, BF16, F32 or F64")
    if TensorRole.ALPHA in keys and math.prod(header.tensors[keys[TensorRole.ALPHA]].shape) != 1:
        raise LoraError(f"{keys[TensorRole.ALPHA]} is not one number")
    if TensorRole.DIFFERENCE in keys:
        _only(keys, {TensorRole.DIFFERENCE}, keys)
        key = keys[TensorRole.DIFFERENCE]
        if header.tensors[key].shape != base:
            raise LoraError(f"{key} has the shape {header.tensors[key].shape}, but {ref} has {base}")
        return
    roles = keys.keys() - _BESIDE
    if not roles or roles & _LORA_ROLES:
        _only(roles, _LORA_ROLES, keys)
        _check_lora(ref, keys, header, base)
    else:
        _check_matrices(ref, keys, header, base)
    _check_magnitude(ref, keys, header, base, rules)


def factor(ref: ModuleRef, tensors: Tensors, rules: AlphaRules) -> Factor:
    """Return what a module's checked tensors make. Raises `LoraError` for numbers that are no weights."""
    if TensorRole.DIFFERENCE in tensors:
        return _difference(ref, tensors[TensorRole.DIFFERENCE])
    found = _product(ref, tensors, rules)
    for role in (TensorRole.MAGNITUDE, TensorRole.DORA_SCALE):
        if role in tensors:
            magnitude = tensors[role]
            _largest(ref, magnitude)
            by_input = role is TensorRole.DORA_SCALE and _is_by_input(tuple(magnitude.shape), found.shape[0])
            return replace(found, magnitude=magnitude.flatten(), by_input=by_input, bound=math.inf)
    return found


# ---- LoRA -----------------------------------------------------------------------------------------------------------


def _check_lora(ref: ModuleRef, keys: Keys, header: container.Header, base: tuple[int, ...]) -> None:
    missing = [role.name.lower() for role in (TensorRole.DOWN, TensorRole.UP) if role not in keys]
    if missing:
        raise LoraError(f"{ref} has no {' and no '.join(missing)} factor, but {', '.join(keys.values())}")
    down, up = header.tensors[keys[TensorRole.DOWN]], header.tensors[keys[TensorRole.UP]]
    rank = down.shape[0] if down.shape else 0
    kernel = base[2:]
    fits_down = down.shape[1:] == base[1:] or (math.prod(kernel) == 1 and _without_ones(down.shape) == (rank, base[1]))
    fits_up = _without_ones(up.shape) == (base[0], rank)
    if rank < 1 or rank > _MAX_RANK or not fits_down or not fits_up:
        of = _made_for(ref, down.shape, base)
        other = "" if of is None else f"; the file is for {of}"
        raise LoraError(f"{ref}: factors {down.shape} and {up.shape} do not make a weight of {base}{other}")


def _made_for(ref: ModuleRef, down: tuple[int, ...], base: tuple[int, ...]) -> str | None:
    """Return the model for which a factor of that shape was made, where names are the same and widths tell."""
    if len(down) != 2 or len(base) != 2:
        return None
    if ref.module == "x_embedder":
        return _INPUTS.get(down[1] // base[1])
    return _WIDTHS.get(down[1]) if base[1] in _WIDTHS and down[1] != base[1] else None


def _difference(ref: ModuleRef, tensor: torch.Tensor) -> Factor:
    """Return what adds a tensor as it is."""
    whole = FileMatrix(right=tensor.reshape(len(tensor), -1))
    return Factor(first=whole, alpha=1.0, rank=1, bound=_largest(ref, tensor))


# ---- LoHa and LoKr --------------------------------------------------------------------------------------------------


def _check_matrices(ref: ModuleRef, keys: Keys, header: container.Header, base: tuple[int, ...]) -> None:
    roles = keys.keys() - _BESIDE
    is_loha = bool(roles & _LOHA_ROLES)
    _only(roles, _LOHA_ROLES if is_loha else _LOKR_ROLES, keys)
    sides = []
    for names in _LOHA if is_loha else _LOKR:
        mine = {role for role in names if role in roles}
        _complete(ref, names, mine, keys)
        shapes = {role: header.tensors[keys[role]].shape for role in mine if role is not None}
        sides.append(_side(keys, shapes, names, base[2:]))
    (rows, columns), (more_rows, more_columns) = sides
    wanted_shape = (base[0], math.prod(base[1:]))
    made = [(rows, columns), (more_rows, more_columns)] if is_loha else [(rows * more_rows, columns * more_columns)]
    if any(shape != wanted_shape for shape in made):
        listed = ", ".join(f"{keys[role]} {header.tensors[keys[role]].shape}" for role in sorted(roles, key=str))
        raise LoraError(f"{ref}: {listed} do not make a weight of {base}")


def _side(
    keys: Keys, shapes: Mapping[TensorRole, tuple[int, ...]], names: _Names, kernel: tuple[int, ...]
) -> tuple[int, int]:
    """Return the shape of one of the two matrices, flattened. Raises `LoraError` if its parts do not fit each other."""
    whole, left, right, core = names
    for role, shape in shapes.items():
        if len(shape) not in {2, 4} or min(shape) < 1 or (len(shape) == 4 and shape[2:] not in {kernel, (1, 1)}):
            raise LoraError(f"{keys[role]} has the shape {shape}, which is no part of a weight")
    if whole is not None and whole in shapes:
        return shapes[whole][0], math.prod(shapes[whole][1:])
    outer, inner = shapes[left], shapes[right]
    if core is not None and core in shapes:
        if len(outer) != 2 or len(inner) != 2 or shapes[core][:2] != (outer[0], inner[0]) or outer[0] > _MAX_RANK:
            raise LoraError(f"{keys[core]} {shapes[core]} does not fit {keys[left]} {outer} and {keys[right]} {inner}")
        return outer[1], inner[1] * math.prod(shapes[core][2:])
    if _without_ones(outer)[1:] != inner[:1] or inner[0] > _MAX_RANK:
        raise LoraError(f"{keys[left]} {outer} and {keys[right]} {inner} have no product")
    return outer[0], math.prod(inner[1:])


def _complete(ref: ModuleRef, names: _Names, found: Collection[TensorRole | None], keys: Keys) -> None:
    """Raise `LoraError` if a matrix is neither whole nor a product."""
    if names.whole is not None and names.whole in found:
        surplus = sorted(keys[role] for role in found if role is not None and role is not names.whole)
        if surplus:
            raise LoraError(f"{ref}: {', '.join(surplus)} beside {keys[names.whole]}, which is the whole matrix")
        return
    missing = [role.name.lower() for role in (names.left, names.right) if role not in found]
    if missing:
        raise LoraError(f"{ref} has no {' and no '.join(missing)}, but {', '.join(sorted(keys.values()))}")


def _product(ref: ModuleRef, tensors: Tensors, rules: AlphaRules) -> Factor:
    kind = _LORA if TensorRole.DOWN in tensors else _LOHA if tensors.keys() & _LOHA_ROLES else _LOKR
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


def _check_magnitude(
    ref: ModuleRef, keys: Keys, header: container.Header, base: tuple[int, ...], rules: AlphaRules
) -> None:
    found = [role for role in (TensorRole.MAGNITUDE, TensorRole.DORA_SCALE) if role in keys]
    if len(found) > 1:
        raise LoraError(f"{ref}: {keys[found[0]]} and {keys[found[1]]} both are its magnitude")
    if not found:
        if rules.decomposes(ref):
            raise LoraError(f"its metadata says use_dora, but {ref} has no magnitude")
        return
    shape = header.tensors[keys[found[0]]].shape
    by_input = found[0] is TensorRole.DORA_SCALE and _is_by_input(shape, base[0])
    if math.prod(shape) != base[int(by_input)] or sum(size > 1 for size in shape) > 1:
        raise LoraError(f"{keys[found[0]]} has the shape {shape}, which is no magnitude of a weight of {base}")


def _is_by_input(shape: tuple[int, ...], rows: int) -> bool:
    """Return whether a `dora_scale` has a number for each input channel: `(1, i, ...)`; `(o, 1, ...)` has one for each
    row."""
    return len(shape) > 1 and shape[0] != rows


def _alpha(ref: ModuleRef, tensors: Tensors, rank: int, rules: AlphaRules) -> float:
    alpha = float(tensors[TensorRole.ALPHA].item()) if TensorRole.ALPHA in tensors else rules.alpha(ref, rank)
    if not math.isfinite(alpha) or alpha == 0.0:
        raise LoraError(f"{ref} has alpha {alpha}")
    return alpha


def _only(roles: Collection[TensorRole], kind: Collection[TensorRole], keys: Keys) -> None:
    others = [keys[role] for role in roles if role not in kind]
    if others:
        mine = next(keys[role] for role in roles if role in kind)
        raise LoraError(f"{mine} and {others[0]} are of two kinds of LoRA")


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
