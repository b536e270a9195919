"""The dense half alone, one call after the other: the module in eager torch, compiled, and plait's half.

The module is run as it was written, on rows that were looked up before: user-side ones repeated over the candidates, as
its `forward` takes them. `torch` is plait's own program on torch: what `plait` falls back to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from plait_bench.benchmark import Metric, Reading, ResultRow, Say, Subject, Workload, pairs_of
from plait_bench.disagg.load.asking import requests_of
from plait_bench.disagg.load.packages import SEED, packaged
from plait_bench.errors import Disagreement, SystemUnavailable
from plait_disagg.graph.sample_inputs import collate, for_module
from plait_disagg.models.configs import build
from plait_disagg.package import Package, open_package
from plait_disagg.package.halves import CompiledDense
from plait_disagg.values import RankRequest
from plait_kernels.executors import background
from plait_kernels.executors.openvino_executor import available

__all__ = ["DENSE_MODELS", "DenseOnly"]

METRIC = "dense_p50_us"
EAGER, COMPILED, TORCH, OURS = "eager", "torch_compile", "torch", "plait"

DENSE_MODELS = ("rm1", "rm2", "rm3", "criteo-kaggle", "mlperf-dcnv2", "din", "two-tower")
_SCALE = 1e-4
"""Of the tables' rows, which are not measured here."""

_BLOCK_S, _MIN_CALLS = 0.1, 5
_THREADS = 1
_TOLERANCE = 1e-5
_CALLS_TO_SETTLE = 4


class DenseOnly(Workload):
    """One request of that many candidates, on one thread. Rounds are medians of a block of calls."""

    systems = (EAGER, COMPILED, TORCH, OURS)
    ours = OURS
    pairs = pairs_of(OURS, (EAGER, COMPILED, TORCH))
    metrics: Mapping[str, Metric] = {METRIC: Metric(unit="us", better="lower")}

    def __init__(self, model: str, candidates: int) -> None:
        self.name = f"dense-{model}-{candidates}"
        self._model, self._candidates = model, candidates

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once; compute with one thread."""
        self._package = open_package(packaged(self._model, _SCALE, say=say))
        self._request = requests_of(self._package, self._model, candidates=self._candidates, count=1)[0]
        threads = torch.get_num_threads()
        torch.set_num_threads(_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the module or the half here."""
        if system in (EAGER, COMPILED):
            module = _dense_module(self._model, self._request)
            yield _DenseCalls(torch.compile(module, dynamic=False) if system == COMPILED else module)
        elif system == OURS and not available():
            raise SystemUnavailable("openvino is not installed")
        else:
            yield _half(self._package, self._request, prepares=system == OURS)

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        """Compare all scores with the module's."""
        made = {name: each.run() for name, each in subjects.items() if isinstance(each, _DenseCalls)}
        for name, scores in made.items():
            worst = float((scores - next(iter(made.values()))).abs().max())
            if not worst <= _TOLERANCE:
                raise Disagreement(f"{self.name}: {name} and {next(iter(made))} differ by up to {worst:.2g}")
        return ()


@dataclass(frozen=True)
class _DenseCalls:
    """Implements `Subject`: calls of something that returns the scores."""

    call: Callable[[], torch.Tensor]
    settle: Callable[[], object] = lambda: None

    def run(self) -> torch.Tensor:
        with torch.inference_mode():
            return self.call()

    def warm_up(self) -> None:
        for _ in range(_CALLS_TO_SETTLE):
            self.run()
            self.settle()

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        taken_us: list[float] = []
        began_s = time.perf_counter()
        with torch.inference_mode():
            self.call()
            while len(taken_us) < _MIN_CALLS or time.perf_counter() - began_s < _BLOCK_S:
                started_s = time.perf_counter()
                self.call()
                taken_us.append((time.perf_counter() - started_s) * 1e6)
        return [Reading(metric=METRIC, value=statistics.median(taken_us))]


def _half(package: Package, request: RankRequest, *, prepares: bool) -> _DenseCalls:
    half: CompiledDense = package.dense(prepares=prepares)
    crossing, candidates = package.sparse().run([request]), [request.candidates]
    return _DenseCalls(lambda: next(iter(half.run(crossing, candidates).values())), background.wait)


def _dense_module(model: str, request: RankRequest) -> _OnGivenRows:
    module, inputs = build(model, rows_scale=_SCALE, seed=SEED)
    batch = collate(inputs, [request.tensors], [request.candidates])
    return _OnGivenRows(module.eval(), for_module(inputs, batch))


class _OnGivenRows(nn.Module):
    """A module whose embeddings give the rows that they gave for `tensors`, its inputs, without looking them up."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        tables = [
            (owner, name, child)
            for owner in module.modules()
            for name, child in owner.named_children()
            if isinstance(child, nn.Embedding | nn.EmbeddingBag)
        ]
        self._given = [_Given() for _ in tables]
        hooks = [
            child.register_forward_hook(lambda _, __, made, given=given: given.rows.append(made))
            for (_, _, child), given in zip(tables, self._given, strict=True)
        ]
        with torch.no_grad():
            module(**self._tensors)
        for hook in hooks:
            hook.remove()
        for (owner, name, _), given in zip(tables, self._given, strict=True):
            setattr(owner, name, given)
        self.module = module

    def forward(self) -> torch.Tensor:
        for given in self._given:
            given.calls = 0
        made: torch.Tensor = self.module(**self._tensors)
        return made


class _Given(nn.Module):
    """Returns its `rows` in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[torch.Tensor] = []
        self.calls = 0

    def forward(self, *_: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.rows[self.calls - 1]
