"""Answers of prepared programs are computed again by torch while nothing else runs, and compared.

Audited are the first call of each shape and one call in `AuditPlan.every`. An answer that differs by more than the
program's tolerance is a drift: from then on torch runs that shape, the log says so, and both answers are kept in a
file. The reference reads weights that are memory-mapped, so auditing holds no second copy of them. It stops between two
of its operations when a request comes: half a UNet in float32 takes seconds on one core, and a low priority alone does
not keep it off the cores that a program's threads wait for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from plait_kernels.executors import PreparedProgram, RowFactors, background

_log = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """What is audited. `every`: one call in so many, beside the first of each shape; 0: no audit at all.

    `pending_bytes` bounds the calls that wait for an idle moment, one of which always may: with every size an image has
    a first call, each step of a busy day could wait. `kept` bounds the files of drifts in `folder`;
    `known_shapes` what is remembered of a program: one that drifts at so many is trusted with none. Nothing is computed
    before the process was idle for `quiet_s`.
    """

    every: int = 10_000
    folder: Path | None = None
    pending_bytes: int = 16 << 20
    kept: int = 16
    known_shapes: int = 1024
    quiet_s: float = 1.0


@dataclass(slots=True, kw_only=True)
class AuditStatistics:
    """Counts since the start. `skipped`: calls that found no room to wait; the next of such a shape may. `largest`: the
    largest difference, as a share of the tolerance."""

    checked: int = 0
    drifted: int = 0
    skipped: int = 0
    failed: int = 0
    largest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    """One call and its answer, in memory of their own."""

    program: AuditedProgram
    key: Hashable
    inputs: tuple[torch.Tensor, ...]
    factors: RowFactors | None
    outputs: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of inputs, outputs and factors: once its batch has ended, nothing else keeps these."""
        factors = () if self.factors is None else chain.from_iterable(self.factors.by_path.values())
        return sum(value.nbytes for value in (*self.inputs, *self.outputs, *factors))


class Auditor:
    """Audits the programs of one process. Thread-safe."""

    def __init__(
        self, plan: AuditPlan, *, idle: Callable[[], bool], on_thread: Callable[[], None] = lambda: None
    ) -> None:
        """Take `idle`, which returns whether nothing else is to be computed now, and `on_thread`, what the auditing
        thread calls first, to leave the cores to others."""
        self.plan = plan
        self._idle = idle
        self._on_thread = on_thread
        self._lock = threading.Lock()
        self._pending: deque[_Sample] = deque()
        self._pending_bytes = 0
        self.is_full = False
        """Whether a call found no room and none has been audited since."""
        self._worker: threading.Thread | None = None
        self._statistics = AuditStatistics()
        self._audited: set[AuditedProgram] = set()
        self._written = 0

    def watch(
        self, name: str, program: PreparedProgram, reference: Callable[[], PreparedProgram], *, tolerance: float
    ) -> PreparedProgram:
        """Return the program, audited. `reference` makes what defines it, once it is needed; `tolerance` is the largest
        difference as a share of an output's largest number."""
        if not self.plan.every:
            return program
        return AuditedProgram(name, program, reference, tolerance=tolerance, auditor=self)

    def statistics(self) -> AuditStatistics:
        """Return the counts as they are now."""
        with self._lock:
            return replace(self._statistics)

    def add(self, sample: _Sample) -> bool:
        """Let a call wait for an idle moment, if there is room; return whether there is."""
        with self._lock:
            self.is_full = bool(self._pending) and self._pending_bytes + sample.nbytes > self.plan.pending_bytes
            if self.is_full:
                self._statistics.skipped += 1
                return False
            self._pending.append(sample)
            self._pending_bytes += sample.nbytes
            if self._worker is None:
                self._worker = background.start("plait-audit", self._work)
            return True

    def forget(self) -> None:
        """Drop the calls that wait or are being audited, and with them their programs."""
        with self._lock:
            self._pending.clear()
            self._pending_bytes, self.is_full = 0, False
            self._audited.clear()

    def wait(self) -> None:
        """Block until nothing is pending; for tests."""
        worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self) -> None:
        self._on_thread()
        while (sample := self._next()) is not None:
            try:
                self._check(sample)
            except _Forgotten:
                pass
            except Exception:
                _log.exception("%s could not be audited", sample.program.name)
                with self._lock:
                    self._statistics.failed += 1
            del sample  # which may be the last that refers to its program, for as long as the next one waits

    def _next(self) -> _Sample | None:
        """Wait for an idle moment; return the oldest call, or None if there is none, or the process ends."""
        while not background.is_ending() and not self._is_quiet():
            time.sleep(_POLL_S)
        with self._lock:
            if background.is_ending() or not self._pending:
                while self._audited:
                    self._audited.pop().release()
                self._worker = None
                return None
            sample = self._pending.popleft()
            self._pending_bytes -= sample.nbytes
            self.is_full = False
            self._audited.add(sample.program)
            return sample

    def _is_quiet(self) -> bool:
        """Return whether the process is idle, and still is after `quiet_s`."""
        until_s = time.monotonic() + self.plan.quiet_s
        while self._idle():
            if time.monotonic() >= until_s or background.is_ending():
                return True
            time.sleep(min(_POLL_S, self.plan.quiet_s))
        return False

    def _wait_idle(self, program: AuditedProgram) -> None:
        """Block while others compute. Raises `_Forgotten` if the program has left meanwhile."""
        while not self._idle() and not background.is_ending():
            if program not in self._audited:
                raise _Forgotten
            time.sleep(_POLL_S)

    def _check(self, sample: _Sample) -> None:
        program = sample.program
        reference = program.reference()  # before giving way: a request may wait for it
        with _GivingWay(lambda: self._wait_idle(program)):
            wanted = reference.run(sample.inputs, sample.factors)
        share = max(map(_difference, sample.outputs, wanted)) / program.tolerance
        drifts = share > 1.0
        with self._lock:
            self._statistics.checked += 1
            self._statistics.drifted += drifts
            self._statistics.largest = max(self._statistics.largest, share)
        if drifts:
            program.switch_off(sample.key)
            kept = self._keep(sample, wanted, share)
            _log.error(
                "%s differs from torch by %.3g times its tolerance at %s: torch runs this shape from now on; %s",
                program.name, share, list(sample.inputs[0].shape),
                f"both answers are in {kept}" if kept else "nothing was kept",
            )  # fmt: skip

    def _keep(self, sample: _Sample, wanted: Sequence[torch.Tensor], share: float) -> Path | None:
        """Write both answers to a file; return its path, or None if there is no folder, or enough files."""
        folder = self.plan.folder
        if folder is None or self._written >= self.plan.kept:
            return None
        self._written += 1
        tensors = {f"input.{i}": value for i, value in enumerate(sample.inputs)}
        tensors |= {f"answer.{i}": value for i, value in enumerate(sample.outputs)}
        tensors |= {f"torch.{i}": value.contiguous() for i, value in enumerate(wanted)}
        date = datetime.now(UTC)
        path = folder / f"{date:%Y%m%d-%H%M%S}-{self._written}-{sample.program.name}.safetensors"
        facts = {
            "program": sample.program.name,
            "date": date.isoformat(timespec="seconds"),
            "share_of_tolerance": f"{share:.4g}",
            "tolerance": f"{sample.program.tolerance:g}",
        }
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=facts)
        except OSError as error:
            _log.warning("the answers of a drift cannot be kept: %s", error)
            return None
        return path


class _Forgotten(Exception):
    """The program of a call has left: no error."""


class _GivingWay(TorchFunctionMode):
    """Within it, `wait` is called before each of the thread's torch operations."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Wait, and compute."""
        self._wait()
        return func(*args, **(kwargs or {}))


class AuditedProgram:
    """A `PreparedProgram` whose answers are sampled. Shapes that drifted are run by the reference."""

    def __init__(
        self,
        name: str,
        program: PreparedProgram,
        make_reference: Callable[[], PreparedProgram],
        *,
        tolerance: float,
        auditor: Auditor,
    ) -> None:
        """Take what `Auditor.watch` was given, and the auditor that samples are handed to."""
        self.name = name
        self.tolerance = tolerance
        self.layers = program.layers
        self._program = program
        self._make_reference = make_reference
        self._reference: PreparedProgram | None = None
        self._auditor = auditor
        self._making = threading.Lock()
        self._known: OrderedDict[Hashable, None] = OrderedDict()
        self._off: set[Hashable] = set()
        self._calls = 0
        self._last: tuple[RowFactors | None, Hashable] = None, (0, ())
        """The factors that came last, and their key: a batch keeps them for many steps."""

    def reference(self) -> PreparedProgram:
        """Return what defines the program."""
        with self._making:
            if self._reference is None:
                self._reference = self._make_reference()
            return self._reference

    def release(self) -> None:
        """Let go of what defines the program, and of its weights' pages, unless calls are run by it."""
        with self._making:
            if not self._off:
                self._reference = None

    def switch_off(self, key: Hashable) -> None:
        """Let the reference run calls of this key's shapes from now on."""
        self._off.add(key)

    def run(
        self, inputs: Sequence[torch.Tensor], factors: RowFactors | None = None, *, copy: bool = True
    ) -> tuple[torch.Tensor, ...]:
        """Compute the outputs."""
        shapes = (*(tuple(value.shape) for value in inputs), self._factor_key(factors))
        if shapes in self._off or len(self._off) >= self._auditor.plan.known_shapes:
            return self.reference().run(inputs, factors)
        self._calls += 1
        # Whether this call is audited must be known before it: what it is given may be overwritten by its answer.
        is_due = shapes not in self._known or self._calls % self._auditor.plan.every == 0
        kept = _copies(inputs) if is_due and not self._auditor.is_full else ()
        outputs = self._program.run(inputs, factors, copy=copy)
        if kept:
            own = _copies(outputs)
            if self._auditor.add(_Sample(program=self, key=shapes, inputs=kept, factors=factors, outputs=own)):
                self._known[shapes] = None
                if len(self._known) > self._auditor.plan.known_shapes:
                    self._known.popitem(last=False)
        return outputs

    def _factor_key(self, factors: RowFactors | None) -> Hashable:
        """Return what of the factors decides which code runs: their rows and, in all, their ranks."""
        if factors is not self._last[0]:
            ranks = () if factors is None else tuple(first.shape[2] for first, _ in factors.by_path.values())
            self._last = factors, (0 if factors is None else factors.given, ranks)
        return self._last[1]


def _difference(answer: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number wanted; infinite where there is NaN."""
    if answer.shape != wanted.shape:
        return float("inf")
    if not answer.numel():
        return 0.0
    share = float((answer - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-6)
    return float("inf") if math.isnan(share) else share  # `max` over several outputs would lose NaN


def _copies(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(value.detach().to("cpu", torch.float32, copy=True) for value in values)
