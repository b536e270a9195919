"""Does the module take the requests that it is checked with? If not, which input is to blame?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from plait_disagg.graph.inputs import Dense, Ids, Input, range_of
from plait_disagg.graph.sample_inputs import collate, for_module, sample
from plait_disagg.package.costing import Cuttable
from plait_disagg.package.errors import PackageError

__all__ = ["check_samples"]

_SAMPLES = 8


def check_samples(module: nn.Module, ready: Cuttable, *, ids_per_bag: Mapping[str, int]) -> None:
    """Run the module on random requests. Raises `PackageError`, naming the input that caused it, if that raises."""
    for seed in range(_SAMPLES):
        count = 2 + seed
        request = sample(ready.inputs, ready.bounds, candidates=count, ids_per_bag=ids_per_bag, seed=seed)
        error = _raised(module, ready, request, count)
        if error is not None:
            raise PackageError(_blamed(module, ready, request, count, error)) from error


def _blamed(
    module: nn.Module, ready: Cuttable, request: Mapping[str, torch.Tensor], candidates: int, error: Exception
) -> str:
    """Return what happened, with the input whose numbers make the difference."""
    said = " ".join(str(error).split())[:200]
    for item in ready.inputs:
        for number in _others(item, ready):
            changed = {**request, item.name: torch.full_like(request[item.name], number)}
            if _raised(module, ready, changed, candidates) is None:
                declared = "low=0, high=1" if isinstance(item, Dense) else "min=1, max=50"
                return (
                    f"the module raises on a random {item.name} ({said}); "
                    f'declare which numbers it takes, as in {type(item).__name__}("{item.name}", {declared})'
                )
    return f"the module raises on a random request: {said}"


def _others(item: Input, ready: Cuttable) -> tuple[int, ...]:
    """Return numbers to try in place of the drawn ones."""
    open_range = range_of(item) == (None, None)
    return (1, 0, 2) if isinstance(item, Ids | Dense) and open_range and item.name not in ready.bounds else ()


def _raised(
    module: nn.Module, ready: Cuttable, request: Mapping[str, torch.Tensor], candidates: int
) -> Exception | None:
    tensors = for_module(ready.inputs, collate(ready.inputs, [request], [candidates]))
    try:
        with torch.no_grad():
            module(**tensors)
    except Exception as error:  # whatever the module says
        return error
    return None
