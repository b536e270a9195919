"""A compiled OpenVINO model as a `PreparedProgram`: any shape at once, and for shapes that recur one of their own.

One model with dynamic axes serves every shape and holds one copy of the weights. A model compiled for one shape holds
another. At the starter's size it takes 0.6 to 0.75 of the time (UNet, 2 to 32 rows, two cores), so small models get one
for each shape that recurs, compiled in the background; for large ones the memory is missing. Such models have few
numbers of rows; a call of another number is filled up with rows of zeros. While there is none for its own, it takes the
model for somewhat more rows, or one for fewer in turns. Rows are divided among streams (`openvino_compiled`).

Factors of a set that recurs, and that all rows share, are merged into the weights of such a model (`fixed_shapes`):
at this size factors take about as long as the layers. It is used only if it answers the call that it is made for as the
dynamic model does.

What a dynamic model computes depends on the first shape that it runs: self-attention that sees a single token there is
wrong for every longer sequence from then on (OpenVINO 2026.4). So every compiled dynamic model runs the probe before
anything else, and is used only if it answers as torch did.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plait_kernels.executors import AdaptedLayer, ExecutorError, RowFactors, background
from plait_kernels.executors.adapters import check_factors
from plait_kernels.executors.compiled_cache import CompiledCache
from plait_kernels.executors.fixed_shapes import fixed
from plait_kernels.executors.openvino_compiled import CompiledModel, compile_model, streams_for
from plait_kernels.executors.row_counts import filled_up, row_counts_below
from plait_kernels.executors.specials import Seen, Shapes, Special, needless_share, with_rows

_log = logging.getLogger(__name__)

_CALLS_BEFORE_SPECIALISING = 2
# A shape gets a model of its own once its calls took so much of what compiling one takes: where shapes hardly recur,
# compiling does not cost more than what it speeds up.
_SHARE_OF_COMPILING = 0.5
# As much where another model has to make room: it must not be one that is asked for as often, in turns.
_TIMES_TO_REPLACE = 6
_MIN_SAVED = 0.01
"""The share of a program's time that a model for one shape must save: without it each shape that was ever asked for
would have one after hours, and all their memory be taken."""
HELD_BY_A_STREAM_BYTES = 24 << 20
"""What a stream of a model for one shape holds beside weights and factors, twice that if it takes factors: generated
code and its graph, by far the most of it."""
# Measured at the starter's size, for half a UNet (10 to 14 MiB of weights), without weights and factors: 20 to 31 MiB
# without factors (2 and 8 rows; 45 to 50 with 32 rows), 52 to 84 MiB with one set for all rows, 41 to 64 MiB with own
# factors of 7 to 79 MiB.
_TIMES_WITH_FACTORS = 2
_MAX_GROWTH = 1.5
"""How much larger a model that a call is filled up to may be: there it takes as long as on the dynamic model."""

_SAVED_BY_MERGING = 0.4
"""The share of a call on a model for its shapes that factors take which are inputs, not merged."""

_TIMES_UNMERGED = 6
"""As `_TIMES_TO_REPLACE`, for a model that takes as inputs what could be merged: sets that recur are merged before, and
where a handful of sets come in turns none is made for all of them, at twice the memory and time."""

_CALLS_TO_WAIT = 100
"""Calls with a shape after which it counts as settled without a model of its own: others are compiled all the time."""

_MAX_SEEN = 1024
"""The shapes whose calls are counted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """A call and torch's answer in float32; `tolerance` is a share of the largest number of an output."""

    inputs: Sequence[torch.Tensor]
    factors: RowFactors | None
    outputs: Sequence[torch.Tensor]
    tolerance: float

    def check(self, got: Sequence[torch.Tensor]) -> None:
        """Raise `ExecutorError` for an answer that differs by more."""
        for mine, wanted in zip(got, self.outputs, strict=True):
            difference, scale = float((mine - wanted).abs().max()), float(wanted.abs().max())
            if not difference <= self.tolerance * max(scale, 1e-6):
                raise ExecutorError(f"it differs from torch by {difference:.2g} on outputs up to {scale:.2g}")


class OpenVinoProgram:
    """A `PreparedProgram` over a converted model. `specialise_bytes` bounds what copies for single shapes hold, and
    `free_bytes` returns how much memory another one may take now. `clock` returns seconds: by them a copy pays or not.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[AdaptedLayer],
        *,
        options: Callable[[], dict[str, Any]],
        specialise_bytes: int,
        free_bytes: Callable[[], int],
        clock: Callable[[], float],
        probe: Probe,
        cache: CompiledCache,
    ) -> None:
        """Compile for any shape, or take that from the cache. Raises `ExecutorError` if the answer to the probe is not
        torch's."""
        self._model = model
        self._layers = tuple(layers)
        self._options = options
        self._probe = probe
        self._cache = cache
        self._compiled_with = options()
        self._dynamic = self._compile_any()
        self._weight_bytes = _constant_bytes(model)
        self._specialise_bytes = specialise_bytes
        self._free_bytes = free_bytes
        self._clock = clock
        self._special: OrderedDict[Special, CompiledModel] = OrderedDict()
        self._seen: OrderedDict[Special, Seen] = OrderedDict()
        self._last: tuple[list[torch.Size], int, RowFactors | None, list[Special]] = [], 0, None, []
        self._compile_s = 0.0
        self._calls = 0
        self._busy_s = 0.0
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._worker: threading.Thread | None = None
        self._settled = True

    @property
    def layers(self) -> tuple[AdaptedLayer, ...]:
        """The layers that take factors."""
        return self._layers

    @property
    def settled(self) -> bool:
        """Whether the last run's shapes have a model of their own, or will never have one."""
        return self._settled

    @property
    def specials(self) -> list[Special]:
        """What has a model of its own, or was found to need none; what was used longest ago first."""
        with self._lock:
            return list(self._special)

    @property
    def is_compiling(self) -> bool:
        """Whether a model for one shape is being compiled."""
        return self._worker is not None

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs in the first input's dtype. Raises `ExecutorError` for factors of other rows."""
        self._check_count(inputs)
        rows = inputs[0].shape[0]
        check_factors(self._layers, rows, factors)
        with self._running:
            self._follow_options()
            return self._run(inputs, factors, rows, copy=copy)

    def _check_count(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `ExecutorError` unless every input of the model gets something: computing without can crash."""
        if len(inputs) + 2 * len(self._layers) != len(self._model.inputs):
            raise ExecutorError(
                f"the model has {len(self._model.inputs)} inputs, not {len(inputs)} and two for each of "
                f"{len(self._layers)} layers"
            )

    def _run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None, rows: int, *, copy: bool
    ) -> tuple[torch.Tensor, ...]:
        wide = [value.detach().to(torch.float32) for value in inputs]
        compiled, accounts, due = self._for_call(wide, rows, factors)
        started_s = self._clock()
        outputs = compiled.infer(wide, factors)
        seconds = self._clock() - started_s
        self._busy_s += seconds
        needless = 1.0  # of a call on the dynamic model
        if compiled.rows:
            needless = needless_share(filled_up(rows), compiled.computed(rows), in_turns=compiled.rows < rows)
        for seen, least in accounts:
            seen.seconds += max(needless, least) * seconds
        if due is not None:
            self._begin(due, wide, factors, outputs if compiled is self._dynamic else None)
        if inputs[0].dtype != torch.float32:
            return tuple(output.to(inputs[0].dtype) for output in outputs)
        return tuple(output.clone() if copy else output for output in outputs)

    def _follow_options(self) -> None:
        """Compile again if the options have changed: a number of threads is part of what is compiled."""
        options = self._options()
        if options == self._compiled_with:
            return
        with self._lock:
            self._compiled_with = options
            self._special.clear()
            self._seen.clear()
        self._dynamic = self._compile_any()

    def _compile_any(self) -> CompiledModel:
        """Compile for any shape, unless that was kept, and run the probe before anything else."""
        self._check_count(self._probe.inputs)
        kept = self._cache.load(self._compiled_with)
        if kept is not None:
            try:
                return self._proven(kept)
            except Exception as error:
                _log.info("what was compiled before is compiled anew: %s", " ".join(str(error).split())[:200])
        compiled = compile_model(self._model, self._compiled_with)
        proven = self._proven(compiled)
        self._cache.save(self._compiled_with, compiled)
        return proven

    def _proven(self, compiled: Any) -> CompiledModel:
        """Run the probe. Raises `ExecutorError` if the answer is not torch's."""
        found = CompiledModel(compiled, self._layers)
        self._probe.check(found.infer(self._probe.inputs, self._probe.factors))
        return found

    # ---- shapes that recur ---------------------------------------------------------------------------------------

    def _for_call(
        self, inputs: Sequence[torch.Tensor], rows: int, factors: RowFactors | None
    ) -> tuple[CompiledModel, list[tuple[Seen, float]], Special | None]:
        """Return what computes these inputs; the accounts of its seconds, each with the least share of them that its
        own model would save; and which model is to be compiled now, if any."""
        self._settled = True
        wanted = self._wanted([value.shape[1:] for value in inputs], filled_up(rows), factors)
        with self._lock:
            self._calls += 1
            if wanted and (compiled := self._use(wanted[0])) is not None:
                return compiled, [], None
            of, found = next(((special, one) for special in wanted if (one := self._at_hand(special))), (None, None))
            better = wanted if of is None else wanted[: wanted.index(of) + 1]
            accounts = {special: self._count(special) for special in better if special not in self._special}
            self._settled = found is not None or all(seen.calls > _CALLS_TO_WAIT for seen in accounts.values())
            due = next((special for special, seen in accounts.items() if self._pays(special, seen)), None)
            due = None if self.is_compiling else due
        behind = _SAVED_BY_MERGING if of is not None and of.merged is None else 0.0
        shares = [(seen, behind if special.merged is not None else 0.0) for special, seen in accounts.items()]
        return found or self._dynamic, shares, due

    def _begin(
        self,
        special: Special,
        inputs: Sequence[torch.Tensor],
        factors: RowFactors | None,
        outputs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Start to compile a copy behind the calls. One with merged factors must answer this call as the dynamic model
        does, whose `outputs` are given unless another model has computed it.

        The dynamic model is asked here and not on that thread: until the next call its memory belongs to the caller of
        this one.
        """
        probe = None
        if special.merged is not None:
            wanted = self._dynamic.infer(inputs, factors) if outputs is None else outputs
            copies = [[value.clone() for value in values] for values in (inputs, wanted)]
            probe = Probe(inputs=copies[0], factors=factors, outputs=copies[1], tolerance=self._probe.tolerance)
        with self._lock:
            self._worker = background.start("plait-compile", functools.partial(self._specialise, special, probe))

    def _wanted(self, sizes: list[torch.Size], rows: int, factors: RowFactors | None) -> list[Special]:
        """Return `_specials`, remembered: the steps of a batch are alike."""
        last_sizes, last_rows, last_factors, found = self._last
        if last_factors is not factors or last_rows != rows or last_sizes != sizes:
            found = self._specials([tuple(size) for size in sizes], rows, factors)
            self._last = sizes, rows, factors, found
        return found

    def _specials(self, sizes: Sequence[tuple[int, ...]], rows: int, factors: RowFactors | None) -> list[Special]:
        """Return which models for single shapes could compute a call, the fastest first; those that are too large are
        left out."""
        name = factors.name if factors is not None else None
        found = [Special(self._shapes(sizes, rows, factors), mergeable=name is not None)]
        if name is not None:
            found.insert(0, Special(self._shapes(sizes, rows, None), name))
        return [special for special in found if self._held_bytes(special.shapes) <= self._specialise_bytes]

    def _pays(self, special: Special, seen: Seen) -> bool:
        """Return whether a model is worth compiling, and there is memory for it; if the budget has no room, in
        the place of the one that was not used for longest, and was not used while the seconds added up."""
        share = _SHARE_OF_COMPILING * (_TIMES_UNMERGED if special.mergeable else 1)
        held = sum(compiled.nbytes for compiled in self._special.values())
        if self._special and held + self._held_bytes(special.shapes) > self._specialise_bytes:
            if next(iter(self._special.values())).used >= seen.since:
                seen.restart(self._calls, self._busy_s)
                return False
            share *= _TIMES_TO_REPLACE
        due_s = share * self._compile_s
        if seen.calls < _CALLS_BEFORE_SPECIALISING or seen.seconds < due_s:
            if self._busy_s - seen.since_s > due_s / _MIN_SAVED:
                seen.restart(self._calls, self._busy_s)
            return False
        if self._free_bytes() >= self._held_bytes(special.shapes):
            return True
        seen.restart(self._calls, self._busy_s)  # that is asked again when as much has added up
        return False

    def _use(self, special: Special) -> CompiledModel | None:
        """Return the model, used by this call; None if there is none."""
        compiled = self._special.get(special)
        if compiled is not None:
            self._special.move_to_end(special)
            compiled.used = self._calls
        return compiled

    def _at_hand(self, special: Special) -> CompiledModel | None:
        """Return the model, or one for more or fewer rows that is not as slow as the dynamic model."""
        return self._use(special) or self._larger(special) or self._smaller(special)

    def _count(self, special: Special) -> Seen:
        """Count a call that such a model could compute; return its account."""
        seen = self._seen.setdefault(special, Seen(self._calls, self._busy_s))
        self._seen.move_to_end(special)
        if len(self._seen) > _MAX_SEEN:
            self._seen.popitem(last=False)
        seen.calls += 1
        return seen

    def _larger(self, special: Special) -> CompiledModel | None:
        """Return the model with the fewest rows that a call can be filled up to, unless that is as slow as the dynamic
        model."""
        rows = special.rows
        for more in range(rows + 1, int(rows * _MAX_GROWTH) + 1):
            larger = special.with_rows(more)
            if larger in self._special and self._special[larger].rows:
                return self._use(larger)
        return None

    def _smaller(self, special: Special) -> CompiledModel | None:
        """Return the model without factors that computes a call's rows in turns, with the fewest rows too many."""
        if special.takes_factors:
            return None
        fewer = map(special.with_rows, row_counts_below(special.rows))
        found = [one for one in fewer if one in self._special and self._special[one].rows]
        return self._use(min(found, key=lambda one: self._special[one].computed(special.rows))) if found else None

    def _shapes(self, sizes: Sequence[tuple[int, ...]], rows: int, factors: RowFactors | None) -> Shapes:
        """Return the inputs' shapes, then the factors' rows, then every layer's rank."""
        by_path = factors.by_path if factors is not None else {}
        ranks = tuple(by_path[layer.path][0].shape[2] if layer.path in by_path else 0 for layer in self._layers)
        given = 1 if factors is None or factors.given == 1 else rows
        return (*((rows, *size) for size in sizes), (given,), ranks)

    def _held_bytes(self, shapes: Shapes) -> int:
        """Return the bytes that a model for these shapes holds, roughly."""
        *_, (given,), ranks = shapes
        widths = (layer.width_in + layer.width_out for layer in self._layers)
        factor_bytes = 4 * given * sum(width * rank for width, rank in zip(widths, ranks, strict=True))
        times = self._streams(shapes[0][0]) * (_TIMES_WITH_FACTORS if any(ranks) else 1)
        return HELD_BY_A_STREAM_BYTES * times + self._weight_bytes + factor_bytes

    def _specialise(self, special: Special, probe: Probe | None) -> None:
        """Compile a copy; the worker's thread. `probe`: the call that a copy with merged factors must answer."""
        options, started_s = self._compiled_with, self._clock()
        try:
            compiled = self._compile(special.shapes, probe.factors if probe is not None else None)
            compile_s = self._clock() - started_s
            if probe is not None:
                probe.check(compiled.infer(probe.inputs, None))
        except Exception as error:
            _log.info("one shape stays with the dynamic model: %s", " ".join(str(error).split())[:200])
            compiled, compile_s = self._dynamic, self._clock() - started_s
        with self._lock:
            self._worker = None
            if options is not self._compiled_with:
                return  # what was compiled has the number of threads of before
            self._compile_s = compile_s
            room = self._specialise_bytes - compiled.nbytes
            while self._special and sum(one.nbytes for one in self._special.values()) > room:
                self._special.popitem(last=False)
            self._seen.pop(special, None)
            self._special[special] = compiled
            mib = [held >> 20 for held in (sum(one.nbytes for one in self._special.values()), self._specialise_bytes)]
        if compiled is not self._dynamic:
            _log.info(
                "compiled for %s in %.1f s; %d copies hold about %d of %d MiB", special.shapes[0], compile_s,
                len(self.specials), *mib,
            )  # fmt: skip

    def _compile(self, shapes: Shapes, merged: RowFactors | None) -> CompiledModel:
        """Return a model for one shape."""
        rows = shapes[0][0]
        streams = self._streams(rows)
        *inputs, (given,), ranks = with_rows(shapes, rows // streams)
        model = fixed(self._model, self._layers, inputs=inputs, given=given, ranks=ranks, merged=merged)
        layers = [layer for layer, rank in zip(self._layers, ranks, strict=True) if rank]
        compiled = compile_model(model, self._compiled_with, streams=streams)
        return CompiledModel(compiled, layers, rows=rows, streams=streams, nbytes=self._held_bytes(shapes))

    def _streams(self, rows: int) -> int:
        return streams_for(rows, self._compiled_with["INFERENCE_NUM_THREADS"])


def _constant_bytes(model: Any) -> int:
    """Return the bytes of the constants in float32, which is what the compiled model holds."""
    sizes = (node.get_output_size() and np.prod(node.get_output_shape(0)) for node in model.get_ops()
             if node.get_type_name() == "Constant")  # fmt: skip
    return int(sum(sizes)) * 4
