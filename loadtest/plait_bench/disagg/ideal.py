"""What a split can be: the same two halves called directly, each in a process of its own, and nothing between them but
the bare tensors.

This process runs the CN's half, copies what crosses into shared memory that both sides have mapped beforehand, and adds
one to an eventfd; the child runs the HN's half over that memory with the executor that plait uses, copies the outputs
into more of it and adds one to another eventfd. No queue, no header, no check, no callers: it cannot serve anybody.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from plait_bench.benchmark import said, started
from plait_disagg.package.read import Package, open_package
from plait_disagg.protocols import SparseHalf
from plait_disagg.values import RankRequest
from plait_kernels.threads import set_threads

_Shapes: TypeAlias = Mapping[str, tuple[torch.dtype, Sequence[int]]]

_Tensors: TypeAlias = Mapping[str, torch.Tensor]


class IdealSplit:
    """The CN's half and the shared memory; `slots` batches may be at the child at once."""

    def __init__(
        self,
        sparse: SparseHalf,
        batches: Sequence[Sequence[RankRequest]],
        slots: Sequence[tuple[_Tensors, _Tensors]],
        asked: int,
        done: int,
    ) -> None:
        self._sparse, self._batches, self._slots = sparse, batches, slots
        self._asked, self._done = asked, done
        self._sent = self._received = 0

    def answers(self, number: int) -> list[torch.Tensor]:
        """Return the outputs of batch `number`, with nothing else at the child."""
        self._put(number)
        return self._get()

    def answers_for(self, seconds: float) -> int:
        """Run batches for so long, each looked up while the child computes those before it; return how many were
        answered."""
        first = self._sent
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            self._put(self._sent)
            if self._sent - self._received == len(self._slots):
                self._get()
        while self._received < self._sent:
            self._get()
        return self._sent - first

    def _put(self, number: int) -> None:
        shared, _ = self._slots[self._sent % len(self._slots)]  # the child takes them in turn
        with torch.inference_mode():
            crossing = self._sparse.run(self._batches[number % len(self._batches)])
            for name, tensor in shared.items():
                tensor.copy_(crossing[name])
        os.eventfd_write(self._asked, 1)
        self._sent += 1

    def _get(self) -> list[torch.Tensor]:
        os.eventfd_read(self._done)
        _, outputs = self._slots[self._received % len(self._slots)]
        self._received += 1
        return [output.clone() for output in outputs.values()]


def _slots(folder: Path, count: int, crossing: _Shapes, outputs: _Shapes) -> list[tuple[_Tensors, _Tensors]]:
    """Map the tensors of each batch, each a file of the folder: what crosses, and the outputs."""

    def mapped(kind: str, shapes: _Shapes) -> _Tensors:
        found = {}
        for number, (name, (dtype, shape)) in enumerate(shapes.items()):
            flat = torch.from_file(f"{folder}/{kind}-{number}", shared=True, size=math.prod(shape), dtype=dtype)
            found[name] = flat.view(*shape)
        return found

    return [(mapped(f"crossing-{slot}", crossing), mapped(f"outputs-{slot}", outputs)) for slot in range(count)]


@contextmanager
def ideal_split(
    package: Package, batches: Sequence[Sequence[RankRequest]], *, threads: int, hn_threads: int, slots: int
) -> Iterator[IdealSplit]:
    """Open both halves for batches whose crossing tensors all have the same shapes. The calling thread computes.

    Raises `SystemFailed`.
    """
    set_threads(threads)
    sparse, candidates = package.sparse(), [request.candidates for request in batches[0]]
    with torch.inference_mode():
        first = sparse.run(batches[0])
    crossing = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in first.items()}
    outputs = {name: (torch.float32, (sum(candidates), *tail)) for name, tail in package.card().outputs.items()}
    bells = tuple(os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(2))
    try:
        with tempfile.TemporaryDirectory(prefix="plait-bench-", dir="/dev/shm") as folder:
            layout = Path(folder), slots, crossing, outputs
            shared = _slots(*layout)
            with started(_dense_half, package.folder, hn_threads, bells, layout, candidates, pass_fds=bells) as child:
                said(child)
                yield IdealSplit(sparse, batches, shared, *bells)
    finally:
        for bell in bells:
            os.close(bell)


def _dense_half(
    package: Path,
    threads: int,
    bells: tuple[int, int],
    layout: tuple[Path, int, _Shapes, _Shapes],
    candidates: list[int],
) -> None:
    """Run the dense half on every batch that is announced, until killed."""
    asked, done = bells
    set_threads(threads)
    dense = open_package(package).dense(prepares=True)
    slots = _slots(*layout)
    print("ready", flush=True)
    with torch.inference_mode():
        while True:
            for crossing, outputs in slots:
                os.eventfd_read(asked)
                made = dense.run(crossing, candidates)
                for name, output in outputs.items():
                    output.copy_(made[name])
                os.eventfd_write(done, 1)
