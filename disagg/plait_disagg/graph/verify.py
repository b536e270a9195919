"""Check that the two halves compute what the module computes: once, when a model is packaged, on random requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait_disagg.graph.execute import Compiled, compile_program, run_reference
from plait_disagg.graph.inputs import Input, named_outputs
from plait_disagg.graph.program import USER_OF, Node
from plait_disagg.graph.sample_inputs import collate, for_module, picked, sample
from plait_disagg.graph.split import Halves
from plait_disagg.tables.protocols import Tables

_EPS = torch.finfo(torch.float32).eps

_MAX_ROUNDING = 1e-3
"""The share of their spread by which rounding may move scores: more would move candidates past each other."""

_BATCHES = ((1,), (7,), (64,), (5, 1, 30))
"""The candidates of the requests of each batch."""

_RTOL, _ULPS = 1e-5, 32.0

_MAX_ID = 1 << 22
"""Whole numbers below may be ids that a model holds as floats: these are not rounded."""


class ReturnsNan(Exception):
    """The module itself returns a number that is NaN, for candidate `row` of `batch` (`sample_inputs.collate`)."""

    def __init__(self, batch: Mapping[str, torch.Tensor], row: int) -> None:
        super().__init__(f"the module returns NaN for candidate {row}")
        self.batch = batch
        self.row = row


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """A batch, and the outputs of the module (`wanted`) and of the halves (`got`).

    `before`: where it is a request again with its candidates in another order, what the halves made of each before.
    """

    candidates: tuple[int, ...]
    batch: Mapping[str, torch.Tensor]
    wanted: Mapping[str, torch.Tensor]
    got: Mapping[str, torch.Tensor]
    before: Mapping[str, torch.Tensor] | None = None

    @property
    def max_absolute(self) -> float:
        """The largest difference of a score."""
        return max(float((value.double() - self.got[name].double()).abs().max()) for name, value in self.wanted.items())

    @property
    def max_relative(self) -> float:
        """The largest difference as a share of the score."""
        shares = (
            (value.double() - self.got[name].double()).abs() / value.double().abs().clamp_min(_unit(value))
            for name, value in self.wanted.items()
        )
        return max(float(share.max()) for share in shares)


def verify_halves(
    module: nn.Module,
    inputs: Sequence[Input],
    halves: Halves,
    *,
    constants: Mapping[str, torch.Tensor],
    tables: Tables,
    bounds: Mapping[str, int],
    bits_promised: bool,
    ids_per_bag: Mapping[str, int] | int = 20,
) -> list[str]:
    """Run `module` and both halves on random requests (bags may be empty) and compare all outputs. Return which
    promises were broken, for people to read.

    Each request is then asked again with its candidates in another order, some of them twice: the scores must be the
    same, or a row has seen another.

    `bounds`: see `id_bounds`. `tables`: the module's own float32 rows. A score may be off by `_RTOL` of itself and
    `_ULPS` units of the last place of the largest score, or of 1, about what layers hold on the way: sums in another
    order, as other processors' kernels make them, are. Where that is exceeded, what counts is how far the scores move
    with the last place of all numbers on the way: `_ULPS` times that, up to a thousandth of the spread of the scores.

    `bits_promised`: single requests must be bit-exact (`keeps_bits`, and float32 rows). The best 10 candidates by every
    single-number output must agree except for ties. Raises `ReturnsNan` if the module does.
    """
    cn, hn = compile_program(halves.cn, constants, tables), compile_program(halves.hn, constants)
    checks: list[BatchCheck] = []
    for number, candidates in enumerate(_BATCHES):
        seeds = range(1000 * number, 1000 * number + len(candidates))
        requests = [
            sample(inputs, bounds, candidates=count, ids_per_bag=ids_per_bag, seed=one, ragged=True)
            for one, count in zip(seeds, candidates, strict=True)
        ]
        batch = collate(inputs, requests, candidates)
        wanted, got = module_outputs(module, inputs, batch), run_halves(cn, hn, batch)
        checks.append(BatchCheck(candidates, batch, wanted, got))
        if len(candidates) == 1 and candidates[0] > 1:
            order = _rearrangement(candidates[0], number)
            again = collate(inputs, [_rearranged(inputs, requests[0], order)], [len(order)])
            one_by_one = [{name: value[order] for name, value in made.items()} for made in (wanted, got)]
            checks.append(BatchCheck((len(order),), again, one_by_one[0], run_halves(cn, hn, again), one_by_one[1]))
    spreads, failures = _spreads(checks), []
    for check in checks:
        atols = rounding = {name: _ULPS * _unit(value) for name, value in check.wanted.items()}
        if not _close(check.wanted, check.got, atols):
            moved = _moved_by_rounding(halves, constants, tables, check)
            rounding = {name: max(atol, _ULPS * moved[name]) for name, atol in atols.items()}
            atols = {
                name: max(atol, min(rounding[name], _MAX_ROUNDING * spreads[name])) for name, atol in atols.items()
            }
        failures.append(_failure(check, atols, rounding, bits_promised=bits_promised))
    return [*filter(None, failures)]


def _failure(
    check: BatchCheck, atols: Mapping[str, float], rounding: Mapping[str, float], *, bits_promised: bool
) -> str:
    """Return which promise a batch breaks, for people to read. `atols`: the absolute tolerance of each output;
    `rounding`: what rounding on the way makes of it."""
    wanted, got, before = check.wanted, check.got, check.before
    what = f"{' + '.join(map(str, check.candidates))} candidates" + " in another order" * (before is not None)
    if not _close(wanted, got, atols):
        if _close(wanted, got, rounding):
            why = "they are what is left of larger numbers, which rounding moves as far"
            return f"{what}: differs by {check.max_absolute:.3g} at scores near 0: {why}"
        if before is not None and not _close(before, got, atols):
            return f"{what}: scores differ by {check.max_absolute:.3g}: a row depends on others"
        return f"{what}: outputs differ by {check.max_absolute:.3g} (relative {check.max_relative:.3g})"
    if not all(_same_top(value, got[name], atols[name]) for name, value in wanted.items() if value.ndim == 1):
        return f"{what}: the best candidates differ"
    is_exact = all(torch.equal(value, got[name]) for name, value in wanted.items())
    if bits_promised and before is None and len(check.candidates) == 1 and not is_exact:
        return f"{what}: bits differ (by {check.max_absolute:.3g}) though the program is exact"
    return ""


def run_halves(cn: Compiled, hn: Compiled, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run both halves, one after the other, without a wire."""
    return hn({**cn(batch), USER_OF: batch[USER_OF]})


def _rearrangement(count: int, seed: int) -> torch.Tensor:
    """Return all of 0 to `count` - 1 in random order, and then some again."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randperm(count, generator=generator) for _ in range(2)])[: count + max(count // 2, 1)]


def _rearranged(
    inputs: Sequence[Input], request: Mapping[str, torch.Tensor], order: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the request for the candidates of `order`."""
    return {**request, **picked([item for item in inputs if item.side == "item"], request, order)}


def module_outputs(
    module: nn.Module, inputs: Sequence[Input], batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what the module makes of a batch (`sample_inputs.collate`), by the outputs' names.

    A module that cannot score one candidate alone (a bare `squeeze()`) scores it twice. Raises `ReturnsNan`.
    """
    made = _outputs(module, inputs, batch)
    for value in made.values():
        rows = value.isnan().reshape(len(value), -1).any(1)
        if rows.any():
            raise ReturnsNan(batch, int(rows.to(torch.uint8).argmax()))
    return made


def _outputs(module: nn.Module, inputs: Sequence[Input], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    single = batch[USER_OF].shape[0] == 1
    try:
        made = _called(module, for_module(inputs, batch))
    except (RuntimeError, IndexError):
        if not single:
            raise
        made = {}
    if made and (not single or all(value.dim() and value.shape[0] == 1 for value in made.values())):
        return made
    again = torch.zeros(2, dtype=torch.int64)
    twice = {**_rearranged(inputs, batch, again), USER_OF: again}
    return {name: value[:1] for name, value in _called(module, for_module(inputs, twice)).items()}


def _called(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return named_outputs(module(**tensors))


def _close(wanted: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor], atols: Mapping[str, float]) -> bool:
    return all(
        value.shape == got[name].shape and torch.allclose(got[name], value, rtol=_RTOL, atol=atols[name])
        for name, value in wanted.items()
    )


def _unit(scores: torch.Tensor) -> float:
    """Return float32's unit of the last place of the largest score, or of 1 if that is larger."""
    return _EPS * max(1.0, float(scores.abs().max()) if scores.numel() else 0.0)


def _spreads(checks: Sequence[BatchCheck]) -> dict[str, float]:
    """Return how far the module's finite scores lie apart, by output."""
    found = {}
    for name in checks[0].wanted:
        scores = torch.cat([check.wanted[name].double().reshape(-1) for check in checks])
        scores = scores[scores.isfinite()]
        found[name] = float(scores.max() - scores.min()) if scores.numel() else 0.0
    return found


def _moved_by_rounding(
    halves: Halves, constants: Mapping[str, torch.Tensor], tables: Tables, check: BatchCheck
) -> dict[str, float]:
    """Return how far each output moves where every number on the way moves by up to a unit of its last place."""
    generator = torch.Generator().manual_seed(0)

    def moved(_: Node, compute: Callable[[], Any]) -> Any:
        made = compute()
        if not isinstance(made, torch.Tensor) or not made.is_floating_point():
            return made
        share = torch.finfo(made.dtype).eps * (2 * torch.rand(made.shape, generator=generator) - 1)
        is_id = (made == made.round()) & (made.abs() < _MAX_ID)
        return torch.where(is_id, made, made * (1 + share).to(made.dtype))

    cn = run_reference(halves.cn, constants, tables, check.batch, moved)
    crossing = {name: cn[ref.name] for name, ref in halves.cn.outputs}
    hn = run_reference(halves.hn, constants, None, {**crossing, USER_OF: check.batch[USER_OF]}, moved)
    differences = {name: (hn[ref.name].double() - check.got[name].double()).abs() for name, ref in halves.hn.outputs}
    return {name: float(part.nan_to_num(0.0, 0.0).max()) for name, part in differences.items()}


def _same_top(wanted: torch.Tensor, got: torch.Tensor, atol: float, best: int = 10) -> bool:
    """Return whether the chosen candidates score as high in `wanted` as its own best, one by one, within tolerance."""
    count = min(best, wanted.shape[0])
    chosen = wanted[got.topk(count).indices].sort(descending=True).values
    return torch.allclose(chosen, wanted.topk(count).values, rtol=2 * _RTOL, atol=2 * atol)
