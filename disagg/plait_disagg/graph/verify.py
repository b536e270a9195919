"""Check that the two halves compute what the module computes: once, when a model is packaged, on random requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from plait_disagg.graph.execute import Compiled, compile_program
from plait_disagg.graph.inputs import Bag, Input
from plait_disagg.graph.program import USER_OF
from plait_disagg.graph.sample_inputs import bags_of, collate, for_module, sample
from plait_disagg.graph.split import Halves
from plait_disagg.tables.protocols import Tables

__all__ = ["BatchCheck", "Verification", "verify_halves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCheck:
    """One batch: `candidates` of its requests, the max differences over all outputs, and whether bits are equal.

    `same_top`: the best 10 candidates by every single-number output agree except for ties within the tolerance.
    `rearranged`: whether it repeats a request with its candidates in another order.
    """

    candidates: tuple[int, ...]
    max_absolute: float
    max_relative: float
    equal_bits: bool
    close: bool
    same_top: bool
    rearranged: bool = False


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All checks. `bits_promised`: single requests had to be bit-exact (`keeps_bits`, and float32 rows)."""

    checks: tuple[BatchCheck, ...]
    bits_promised: bool

    @property
    def ok(self) -> bool:
        """True if every promise was kept."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """The checks that failed, for people to read."""
        return tuple(text for check in self.checks if (text := self._failure(check)))

    def _failure(self, check: BatchCheck) -> str:
        what = f"{' + '.join(map(str, check.candidates))} candidates"
        if check.rearranged and not check.close:
            return f"{what} in another order: scores differ by {check.max_absolute:.3g}: a row depends on others"
        if not check.close:
            return f"{what}: outputs differ by {check.max_absolute:.3g} (relative {check.max_relative:.3g})"
        if not check.same_top:
            return f"{what}: the best candidates differ"
        if self.bits_promised and not check.rearranged and len(check.candidates) == 1 and not check.equal_bits:
            return f"{what}: bits differ (by {check.max_absolute:.3g}) though the program is exact"
        return ""


def verify_halves(
    module: nn.Module,
    inputs: Sequence[Input],
    halves: Halves,
    *,
    constants: Mapping[str, torch.Tensor],
    tables: Tables,
    bounds: Mapping[str, int],
    bits_promised: bool,
    batches: Sequence[Sequence[int]] = ((1,), (7,), (64,), (5, 1, 30)),
    ids_per_bag: Mapping[str, int] | int = 20,
    rtol: float = 1e-5,
    ulps: float = 32.0,
    seed: int = 0,
) -> Verification:
    """Run `module` and both halves on random requests (bags may be empty) and compare all outputs.

    Each request is then asked again with its candidates in another order, some of them twice: the scores must be the
    same, or a row has seen another.

    `bounds`: see `id_bounds`. `batches`: candidates of the requests of each batch. `tables` other than the
    module's own float32 rows need wider tolerances. A score may be off by `rtol` of itself and `ulps` units of the last
    place of the largest score, or of 1, about what layers hold on the way: sums in another order, as other processors'
    kernels make them, are.
    """
    cn = compile_program(halves.cn, constants, tables)
    hn = compile_program(halves.hn, constants)
    checks = []
    for number, candidates in enumerate(batches):
        requests = [
            sample(
                inputs,
                bounds,
                candidates=count,
                ids_per_bag=ids_per_bag,
                seed=seed + 1000 * number + index,
                ragged=True,
            )
            for index, count in enumerate(candidates)
        ]
        batch = collate(inputs, requests, candidates)
        wanted = _module_outputs(module, inputs, batch)
        got = run_halves(cn, hn, batch)
        checks.append(_compare(tuple(candidates), wanted, got, rtol, ulps))
        if len(candidates) == 1 and candidates[0] > 1:
            order = _rearrangement(candidates[0], seed + number)
            again = run_halves(cn, hn, collate(inputs, [_rearranged(inputs, requests[0], order)], [len(order)]))
            expected = {name: value[order] for name, value in wanted.items()}
            checks.append(replace(_compare((len(order),), expected, again, rtol, ulps), rearranged=True))
    return Verification(checks=tuple(checks), bits_promised=bits_promised)


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
    made = dict(request)
    for item in inputs:
        if item.side == "item" and isinstance(item, Bag):
            made |= bags_of(item, request, order)
        elif item.side == "item":
            made[item.name] = request[item.name][order]
    return made


def _module_outputs(
    module: nn.Module, inputs: Sequence[Input], batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what the module makes. A module that cannot score one candidate alone (a bare `squeeze()`) scores it
    twice."""
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
        made = module(**tensors)
    if isinstance(made, torch.Tensor):
        return {"score": made}
    if isinstance(made, Mapping):
        return {str(name): value for name, value in made.items()}
    return {f"score_{index}": value for index, value in enumerate(made)}


def _compare(
    candidates: tuple[int, ...],
    wanted: Mapping[str, torch.Tensor],
    got: Mapping[str, torch.Tensor],
    rtol: float,
    ulps: float,
) -> BatchCheck:
    units = {name: _unit(value) for name, value in wanted.items()}
    differences = [(wanted[name].double() - got[name].double()).abs() for name in wanted]
    scales = [value.double().abs().clamp_min(units[name]) for name, value in wanted.items()]
    same_shapes = all(wanted[name].shape == got[name].shape for name in wanted)
    return BatchCheck(
        candidates=candidates,
        max_absolute=max(float(part.max()) for part in differences),
        max_relative=max(float((part / scale).max()) for part, scale in zip(differences, scales, strict=True)),
        equal_bits=same_shapes and all(torch.equal(wanted[name], got[name]) for name in wanted),
        close=same_shapes
        and all(torch.allclose(got[name], value, rtol=rtol, atol=ulps * units[name]) for name, value in wanted.items()),
        same_top=all(
            _same_top(value, got[name], rtol, ulps * units[name]) for name, value in wanted.items() if value.ndim == 1
        ),
    )


def _unit(scores: torch.Tensor) -> float:
    """Return float32's unit of the last place of the largest score, or of 1 if that is larger."""
    return torch.finfo(torch.float32).eps * max(1.0, float(scores.abs().max()) if scores.numel() else 0.0)


def _same_top(wanted: torch.Tensor, got: torch.Tensor, rtol: float, atol: float, best: int = 10) -> bool:
    """Return whether the chosen candidates score as high in `wanted` as its own best, one by one, within tolerance."""
    count = min(best, wanted.shape[0])
    chosen = wanted[got.topk(count).indices].sort(descending=True).values
    return torch.allclose(chosen, wanted.topk(count).values, rtol=2 * rtol, atol=2 * atol)
