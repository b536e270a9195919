"""Does the module take the requests that it is checked with? If not, which input is to blame?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from plait_disagg.graph.costs import Cuttable
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Ids, Input, range_of
from plait_disagg.graph.program import USER_OF
from plait_disagg.graph.sample_inputs import collate, sample
from plait_disagg.graph.verify import ReturnsNan, module_outputs
from plait_disagg.package.manifest import PackageError

_SAMPLES = 8

_SHOWN = 8
"""Numbers of an input in a message."""


def check_samples(module: nn.Module, ready: Cuttable, *, ids_per_bag: Mapping[str, int]) -> None:
    """Run the module on random requests. Raises `PackageError`, naming the input that caused it, if that raises or
    returns NaN."""
    for seed in range(_SAMPLES):
        count = 2 + seed
        request = sample(ready.inputs, ready.bounds, candidates=count, ids_per_bag=ids_per_bag, seed=seed)
        batch = collate(ready.inputs, [request], [count])
        error = _fault(module, ready, batch)
        if error is not None:
            raise PackageError(blamed(module, ready, batch, error)) from error


def blamed(module: nn.Module, ready: Cuttable, batch: Mapping[str, torch.Tensor], error: Exception) -> str:
    """Return what the module did with a random batch (`collate`), with the input whose numbers make the difference."""
    nan = error.row if isinstance(error, ReturnsNan) else None
    said = " ".join(str(error).split())[:200]
    for item in ready.inputs:
        is_open = _is_open(item, ready)
        hint = f"; {_declaration(item)}" if is_open else ""
        for number in (1, 0, 2) if is_open or nan is not None else ():
            if _fault(module, ready, {**batch, **_filled(item, batch, number)}) is not None:
                continue
            if nan is not None:
                return f"the model itself returns NaN for a random {_shown(item, batch, nan)}{hint}"
            return f"the module raises on a random {item.name} ({said}){hint}"
    if nan is not None:
        every = ", ".join(_shown(item, batch, nan) for item in ready.inputs)
        return f"the model itself returns NaN for a random request: {every}"
    return f"the module raises on a random request: {said}"


def _is_open(item: Input, ready: Cuttable) -> bool:
    """Return whether neither a table nor a declaration says which numbers an input has."""
    return isinstance(item, Ids | Dense) and range_of(item) == (None, None) and item.name not in ready.bounds


def _declaration(item: Input) -> str:
    declared = "low=0, high=1" if isinstance(item, Dense) else "min=1, max=50"
    return f'declare which numbers it takes, as in {type(item).__name__}("{item.name}", {declared})'


def _filled(item: Input, batch: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an input that is `number` throughout; a bag has one id in each row."""
    if not isinstance(item, Bag):
        return {item.name: torch.full_like(batch[item.name], number)}
    rows = len(batch[item.name + OFFSETS]) - 1
    made = {item.name: torch.zeros(rows, dtype=torch.int64), item.name + OFFSETS: torch.arange(rows + 1)}
    return made | ({item.name + WEIGHTS: torch.full((rows,), float(number))} if item.weighted else {})


def _shown(item: Input, batch: Mapping[str, torch.Tensor], candidate: int) -> str:
    """Return what an input is for one candidate, for people to read."""
    row = candidate if item.side == "item" else int(batch[USER_OF][candidate])
    if isinstance(item, Bag):
        first, last = batch[item.name + OFFSETS][row : row + 2].tolist()
        numbers = batch[item.name][first:last]
    else:
        numbers = batch[item.name][row].reshape(-1)
    shown = ", ".join(f"{number:.4g}" for number in numbers[:_SHOWN].tolist())
    return f"{item.name} [{shown}{', ...' if len(numbers) > _SHOWN else ''}]"


def _fault(module: nn.Module, ready: Cuttable, batch: Mapping[str, torch.Tensor]) -> Exception | None:
    """Return what the module raises, or that it returns NaN; None if neither."""
    try:
        module_outputs(module, ready.inputs, batch)
    except Exception as error:  # whatever the module says
        return error
    return None
