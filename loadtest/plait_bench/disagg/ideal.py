"""What a split can be: the same two halves called directly, each in a process of its own, and nothing between them but
the bare tensors.

This process runs the CN's half, copies what crosses into shared memory whose layout both sides know beforehand, and
adds one to an eventfd; the child runs the HN's half over views of that memory with the executor that plait uses, copies
the outputs behind them and adds one to another eventfd. No queue, no header, no check, no callers: it cannot serve
anybody.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from plait_bench.benchmark import said, started
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import SparseHalf
from plait_disagg.values import RankRequest
from plait_kernels.threads import set_threads

_ALIGNMENT_BYTES = 64

_Shapes = Mapping[str, tuple[str, Sequence[int]]]
"""Dtype and shape of each tensor, by name."""


class IdealSplit:
    """The CN's half and the shared memory; `slots` batches may be at the child at once."""

    def __init__(
        self,
        sparse: SparseHalf,
        batches: Sequence[Sequence[RankRequest]],
        slots: Sequence[_Slot],
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
        slot = self._slots[self._sent % len(self._slots)]  # the child takes them in turn
        with torch.inference_mode():
            crossing = self._sparse.run(self._batches[number % len(self._batches)])
            for name, tensor in slot.crossing.items():
                tensor.copy_(crossing[name])
        os.eventfd_write(self._asked, 1)
        self._sent += 1

    def _get(self) -> list[torch.Tensor]:
        os.eventfd_read(self._done)
        slot = self._slots[self._received % len(self._slots)]
        self._received += 1
        return [output.clone() for output in slot.outputs.values()]


class _Slot:
    """The tensors of one batch in shared memory: what crosses, then the outputs."""

    def __init__(self, memory: mmap.mmap, start: int, crossing: _Shapes, outputs: _Shapes) -> None:
        self.crossing: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        for shapes, tensors in ((crossing, self.crossing), (outputs, self.outputs)):
            for name, (dtype_name, shape) in shapes.items():
                dtype: torch.dtype = getattr(torch, dtype_name)
                flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start)
                tensors[name] = flat.view(*shape)
                start += _room(dtype_name, shape)


def _room(dtype_name: str, shape: Sequence[int]) -> int:
    dtype: torch.dtype = getattr(torch, dtype_name)
    nbytes = math.prod(shape) * dtype.itemsize
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _slots(memory: mmap.mmap, count: int, crossing: _Shapes, outputs: _Shapes) -> list[_Slot]:
    size = sum(_room(*described) for described in (*crossing.values(), *outputs.values()))
    return [_Slot(memory, number * size, crossing, outputs) for number in range(count)]


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
    crossing = {name: (str(it.dtype).removeprefix("torch."), list(it.shape)) for name, it in first.items()}
    outputs = {name: ("float32", [sum(candidates), *tail]) for name, tail in package.card().outputs.items()}
    nbytes = slots * sum(_room(*described) for described in (*crossing.values(), *outputs.values()))
    descriptors = os.memfd_create("ideal"), *(os.eventfd(0, os.EFD_SEMAPHORE) for _ in range(2))
    shapes = slots, crossing, outputs
    try:
        os.ftruncate(descriptors[0], nbytes)
        how = (_dense_half, package.folder, hn_threads, descriptors, shapes, candidates)
        with started(*how, pass_fds=descriptors) as child:
            said(child)
            memory = mmap.mmap(descriptors[0], nbytes)
            yield IdealSplit(sparse, batches, _slots(memory, *shapes), descriptors[1], descriptors[2])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _dense_half(
    folder: Path, threads: int, descriptors: Sequence[int], shapes: tuple[int, _Shapes, _Shapes], candidates: list[int]
) -> None:
    """Run the dense half on every batch that is announced, until killed."""
    memory, asked, done = descriptors
    set_threads(threads)
    dense = open_package(folder).dense(prepares=True)
    slots = _slots(mmap.mmap(memory, 0), *shapes)
    print("ready", flush=True)
    with torch.inference_mode():
        while True:
            for slot in slots:
                os.eventfd_read(asked)
                made = dense.run(slot.crossing, candidates)
                for name, output in slot.outputs.items():
                    output.copy_(made[name])
                os.eventfd_write(done, 1)
