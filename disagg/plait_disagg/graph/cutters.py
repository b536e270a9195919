"""The cutters by name, and Prism's (Yang et al., NSDI'25), as far as it is known: the baseline beside `MinCut`.

The paper's text is not publicly available to us; a reading note describes it. Colouring: every matrix product and
attention is a seed; the HN's part grows from the seeds along edges in both directions and stops at CPU-intensive
operators (embedding lookups and whatever makes their ids). Two refinements: constants belong to the HN and are never
sent (here this holds for both cutters), and when several crossing tensors come from one ancestor, the ancestor is
sent if that is fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from plait_disagg.graph.cut import CutProblem, Cutter, crossing_values
from plait_disagg.graph.edit import reads
from plait_disagg.graph.mincut import MinCut
from plait_disagg.graph.operators import kind_of
from plait_disagg.graph.program import LOOKUP


class PrismColouring:
    """A cutter by colouring that considers bytes, never seconds."""

    name = "prism"

    def cut(self, problem: CutProblem) -> frozenset[str]:
        """Implement `Cutter.cut` by colouring from the seeds."""
        graph = _Graph(problem)
        hn = graph.grown(name for name in graph.names if graph.kinds[name] in ("gemm", "attention"))
        return frozenset(graph.names - graph.with_ancestors_sent(graph.closed(hn)))


class _Graph:
    """The program's nodes with their neighbours. `fixed`: lookups and everything that their ids are computed from."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.read: Mapping[str, tuple[str, ...]] = reads(problem.program)
        self.names = frozenset(self.read)
        self.kinds = {node.name: kind_of(node.op) for node in problem.program.nodes}
        self.readers: dict[str, set[str]] = {}
        for name, values in self.read.items():
            for value in values:
                self.readers.setdefault(value, set()).add(name)
        lookups = {node.name for node in problem.program.nodes if node.op == LOOKUP}
        self.fixed = frozenset(lookups | self._before(lookups))

    def grown(self, seeds: Iterable[str]) -> set[str]:
        """Return everything that the colour reaches from the seeds without passing a fixed node."""
        hn: set[str] = set()
        waiting = [name for name in seeds if name not in self.fixed]
        while waiting:
            name = waiting.pop()
            if name not in hn:
                hn.add(name)
                near = {*self.read[name], *self.readers.get(name, ())} & self.names
                waiting += near - self.fixed - hn
        return hn

    def closed(self, hn: set[str]) -> set[str]:
        """Return `hn` with everything computed from it, so that nothing flows back."""
        return hn | self._after(hn)

    def with_ancestors_sent(self, hn: set[str]) -> set[str]:
        """Grow the HN's part upwards wherever an ancestor is smaller than what crosses now."""
        while True:
            best = min((self._up_to(ancestor, hn) for ancestor in self._ancestors(hn)), key=self._bytes, default=hn)
            if self._bytes(best) >= self._bytes(hn):
                return hn
            hn = best

    def _ancestors(self, hn: set[str]) -> list[str]:
        """Return what crossing values are computed from, inputs included."""
        crossing = set(crossing_values(self.problem.program, self.names - hn))
        return sorted(self._before(crossing & self.names, inputs=True) | crossing)

    def _up_to(self, ancestor: str, hn: set[str]) -> set[str]:
        """Return the HN's part with everything that can be computed there from `ancestor` moved to it."""
        return hn | {name for name in self._after({ancestor}) if name not in self.fixed}

    def _bytes(self, hn: set[str]) -> int:
        crossing = crossing_values(self.problem.program, self.names - frozenset(hn))
        return sum(self.problem.value_bytes[value] for value in crossing)

    def _before(self, names: Iterable[str], *, inputs: bool = False) -> set[str]:
        return _reached(names, lambda name: [of for of in self.read.get(name, ()) if inputs or of in self.names])

    def _after(self, names: Iterable[str]) -> set[str]:
        return _reached(names, lambda name: self.readers.get(name, ()))


def _reached(names: Iterable[str], step: Callable[[str], Iterable[str]]) -> set[str]:
    """Return what is any number of steps, at least one, from any of `names`."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        near = [name for name in step(waiting.pop()) if name not in found]
        found.update(near)
        waiting += near
    return found


CUTTERS: Mapping[str, Cutter] = MappingProxyType({cutter.name: cutter for cutter in (MinCut(), PrismColouring())})
"""The cutters by name: `mincut` (exact) and `prism` (the baseline)."""
