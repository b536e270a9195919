"""How a prepared module runs: `torch` is the definition, `openvino` the default on CPUs. One protocol for both.

A `Computation` is a module over tensors with the sizes that may vary. An executor prepares it once; the
`PreparedProgram` then runs it for any number of rows and any size. LoRA factors are inputs of a program, row by row, so
a call may hold rows of different LoRA sets and nothing is merged.

Symbols: R rows, r rank. A row's factors of a layer are A `(in, r)` and B `(r, out)`; the layer adds `x @ A @ B`. For a
convolution x are the windows of its input, as `torch.nn.functional.unfold` makes them: in = channels * kh * kw.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import nn

# The import of openvino reports usage over the network unless `openvino_telemetry` is missing. It does so in a forked
# copy of the process. A server has other threads, whose locks nobody opens in the copy: one that waited for standard
# input's for ever kept the server's pipes open.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # an import of it raises ImportError

MODULES = threading.RLock()
"""Held by whoever builds, loads or traces a module: one thread at a time.

Loaders of libraries patch `torch.nn.Module` for the whole process while they load (what others build meanwhile lands on
the meta device), and torch's tracer keeps a map of modules in a global (two traces at once mix their graphs).
"""

Factors: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A `float32 (R, in, r)` and B `float32 (R, r, out)` of one layer. Rows of a lower rank are padded with zeros.

`(1, in, r)` and `(1, r, out)` where all rows have the same."""


class ExecutorError(RuntimeError):
    """A module could not be prepared; the message says why. The torch executor runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One input. `shape` has None where the size may vary from call to call; the first axis is the rows.

    Floating inputs are computed as float32; others (int64, bool) are taken as they are.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLayer:
    """A layer that takes factors: a linear layer or a convolution. `path` is its dotted name in the module."""

    path: str
    width_in: int
    width_out: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowFactors:
    """The LoRA factors of R rows by layer path. Layers that are not named add nothing. Do not change it: programs
    recognise it by identity."""

    rows: int
    by_path: Mapping[str, Factors]

    @property
    def given(self) -> int:
        """How many rows the tensors have, the same in all layers: R, or 1 for all rows."""
        return next((len(first) for first, _ in self.by_path.values()), 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computation:
    """A module to prepare. `module(*inputs)` returns a tuple of tensors; `example` has a tensor for each input.

    `takes_factors`: whether its linear layers and convolutions become adapted layers. `operators`: the traced operators
    (`aten::linear`) that an executor with kernels of its own is known to compute as torch does; one more, and it
    refuses. None: any.
    """

    module: nn.Module
    inputs: tuple[InputSpec, ...]
    example: tuple[torch.Tensor, ...]
    takes_factors: bool = False
    operators: frozenset[str] | None = None


class PreparedProgram(Protocol):
    """A prepared computation. Threads take turns."""

    @property
    def layers(self) -> tuple[AdaptedLayer, ...]:
        """The layers that take factors; empty if the computation takes none."""

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs, in the dtype of the first input.

        With `copy=False` they may live in the program's own memory, which the next `run` overwrites: then one thread
        only.
        """
