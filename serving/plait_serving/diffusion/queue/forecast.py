"""How much compute a request will take: the one predictor for admission, `retry-after`, deadlines and shares.

Two questions with two answers:

- `work_s`: the compute-seconds that a request will be *charged*. A step of T seconds with r rows charges T / r for each
  row, so the charges of all that waits are the seconds until it is done, batching included: they are learned from the
  batches that real requests shared. A text encoder call is charged to its request, as is encoding the image of an
  edit; a decode to its images.
- `alone_s`: the least time that it can take, on its own and with nothing else to do (`costs`): a deadline before that
  cannot be met.

What was never measured is scaled from the nearest that was: steps by the work of their rows (`RowKind`) and
ControlNets, decodes by pixels. Up only by the square root of that: a small call is mostly the cost of any call, and a
request that is refused for a guess is never measured. What is only told to people is a `guess_s`, which goes all the
way. Nothing measured: 0.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from statistics import median
from typing import Generic, TypeVar

from plait_serving.diffusion.queue.costs import MAX_KINDS, StepCosts
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.request_terms import RequestSize, RowKind
from plait_serving.diffusion.values import ImageRequest

_KEPT = 31
"""The newest charges of a kind; their median is the forecast, so one slow step in two does not move it."""

K = TypeVar("K", bound=Hashable)


class WorkForecast:
    """The charges of the newest requests. Thread-safe: requests are weighed on the threads of their callers."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._steps: _Charges[tuple[RowKind, float]] = _Charges(lambda kind: kind[0].work * (1.0 + kind[1]))
        self.encodes, self.sources, self.decodes = (_Charges[int](float) for _ in range(3))
        """Seconds by kind: of a chunk of a prompt, all of kind 1, and by their pixels of the image that an edit starts
        from and of an image that is decoded."""

    def charged_step(self, size: RequestSize, row_s: float) -> None:
        """Record that a step charged `row_s` seconds for each row of such a request."""
        self._steps.add((size.row, size.controls), row_s)

    def work_s(self, request: ImageRequest, size: RequestSize) -> float:
        """Return the compute-seconds that a request will be charged."""
        row_s = self._steps.expected((size.row, size.controls))
        return request.calls * request.n * size.rows * row_s + self._ends_s(request, size)

    def guess_s(self, request: ImageRequest, size: RequestSize) -> float:
        """Return about how many compute-seconds a request takes, whatever the size of those that were measured."""
        row_s = self._steps.expected((size.row, size.controls), is_guess=True)
        image_s = self.decodes.expected(request.width * request.height, is_guess=True)
        return request.n * (request.calls * size.rows * row_s + image_s)

    def alone_s(self, request: ImageRequest, size: RequestSize) -> float:
        """Return the least seconds from its first step to its images; 0 before anything like it was measured."""
        step_s = self._costs.shortest_s(GroupKey(size.shape, size.row, request.loras), request.n * size.rows)
        return request.calls * step_s + self._ends_s(request, size) if step_s else 0.0

    def longest_s(self, request: ImageRequest, size: RequestSize) -> float:
        """Return the compute-seconds that a request will be charged at most: as those before it, or alone."""
        return max(self.work_s(request, size), self.alone_s(request, size))

    def decode_s(self, request: ImageRequest) -> float:
        """Return the seconds that decoding its images takes."""
        return request.n * self.decodes.expected(request.width * request.height)

    def _ends_s(self, request: ImageRequest, size: RequestSize) -> float:
        """Return the seconds before the first step and after the last."""
        source_s = 0.0 if request.edit is None else self.sources.expected(request.width * request.height)
        return size.chunks * self.encodes.expected(1) + source_s + self.decode_s(request)


class _Charges(Generic[K]):
    """The newest seconds of the kinds that were charged last, in the order of their work, so that few are looked at.
    Thread-safe."""

    def __init__(self, work: Callable[[K], float]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._kinds: OrderedDict[K, deque[float]] = OrderedDict()
        self._by_work: list[K] = []

    def add(self, kind: K, seconds: float) -> None:
        with self._lock:
            if kind not in self._kinds:
                insort(self._by_work, kind, key=self._work)
            self._kinds.setdefault(kind, deque(maxlen=_KEPT)).append(seconds)
            self._kinds.move_to_end(kind)
            if len(self._kinds) > MAX_KINDS:
                gone, _ = self._kinds.popitem(last=False)
                first = bisect_left(self._by_work, self._work(gone), key=self._work)
                del self._by_work[self._by_work.index(gone, first)]

    def expected(self, kind: K, *, is_guess: bool = False) -> float:
        """Return the seconds of `kind`; if it is unknown, those of the nearest known kind by work, scaled; 0 if there
        is none."""
        with self._lock:
            known = self._kinds.get(kind)
            if known is not None:
                return median(known)
            work = self._work(kind)
            after = bisect_left(self._by_work, work, key=self._work)
            scales = {seen: work / self._work(seen) for seen in self._by_work[max(0, after - 1) : after + 1]}
            if not scales:
                return 0.0
            nearest = min(scales, key=lambda seen: abs(math.log(scales[seen])))
            scale = scales[nearest]
            return median(self._kinds[nearest]) * (scale if is_guess else min(scale, math.sqrt(scale)))
