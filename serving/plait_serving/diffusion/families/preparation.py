"""Prepares the parts of a model with an executor: at once what was converted before, behind the server what was not.
Torch runs a part until its programs take over.

Converting works on a second, memory-mapped load of the files, so it never sees a LoRA that torch has merged meanwhile.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from plait_kernels.cores import usable_cores
from plait_kernels.devices import is_gpu
from plait_kernels.executors import Computation, ExecutorError, PreparedProgram, background
from plait_kernels.executors.audit import Auditor, AuditPlan
from plait_kernels.executors.openvino_executor import OpenVinoExecutor, OpenVinoSettings, available
from plait_kernels.executors.store import ProgramStore
from plait_kernels.executors.torch_program import TorchProgram
from plait_kernels.threads import lower_priority, run_on_own_thread, set_threads
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.knobs import ExecutorName
from plait_serving.diffusion.memory import available_bytes, gigabytes
from plait_serving.diffusion.weight_files import WeightFiles

if TYPE_CHECKING:
    from plait_serving.diffusion.families.encoders import WeightedPart

_log = logging.getLogger(__name__)

_COPY = 1.25
_WORKING_BYTES = 500_000_000
"""What converting and compiling take: with SD 1.5's UNet (3.4 GB of weights) a process peaked 7.0 GB above what torch
held, of which 2.2 GB were mapped files."""

_LEFT_FREE_BYTES = 1 << 30
"""What copies of programs leave to everything else."""
GRAPH_PATIENCE = 32
"""Steps that a new shape makes without a graph, if there is never a moment without work: capturing takes as long as a
dozen, and is worth a tenth of each."""
Compute: TypeAlias = Callable[[Any], Computation]
"""Makes the computation of a part's module, whose weights are mapped."""
Computes: TypeAlias = Mapping[str, Compute]
"""A part's programs, by name."""
_Owner = TypeVar("_Owner")
_PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Preparer:
    """Prepares with one executor. Thread-safe."""

    def __init__(self, executor: OpenVinoExecutor, auditor: Auditor) -> None:
        """Take the executor; `auditor` watches every program."""
        self._executor = executor
        self._auditor = auditor
        self._keys: dict[Path, str] = {}

    def open(self, part: WeightedPart, name: str, compute: Compute) -> PreparedProgram | None:
        """Return a program of a part if it was converted before; audits compare it with what is computed."""
        try:
            program = self._executor.open(self._key(part.files.folder, name))
        except OSError as error:
            _log.warning("prepared models cannot be read: %s", error)
            return None
        return None if program is None else self._watched(program, part, name, compute)

    def make(self, part: WeightedPart, name: str, compute: Compute) -> PreparedProgram:
        """Return a program of a part, converted now if need be. Raises `ExecutorError`, `ModelError` or OSError."""
        folder = part.files.folder
        if background.is_ending():
            raise ExecutorError("the process ends")
        _check_memory(part.files)
        started_s = time.perf_counter()
        program = self._executor.prepare(self._key(folder, name), lambda: compute(part.mapped()))
        _log.info("%s: %s is prepared after %.1f s", folder, name, time.perf_counter() - started_s)
        return self._watched(program, part, name, compute)

    def _watched(self, program: PreparedProgram, part: WeightedPart, name: str, compute: Compute) -> PreparedProgram:
        return self._auditor.watch(
            f"{part.files.folder.name}-{name}",
            program,
            lambda: TorchProgram(compute(part.mapped())),
            tolerance=self._executor.tolerance,
        )

    def _key(self, folder: Path, name: str) -> str:
        key = self._keys.get(folder)
        if key is None:
            key = self._keys[folder] = self._executor.key(folder)
        return f"{key}-{name}"


def _check_memory(files: WeightFiles) -> None:
    """Raise `ExecutorError` if a program's own copy of weights would not fit beside torch's."""
    need = int(files.nbytes_as(torch.float32) * _COPY) + _WORKING_BYTES
    free = available_bytes(torch.device("cpu"))
    if need > free:
        raise ExecutorError(f"preparing {files.folder} takes up to {gigabytes(need)}; {gigabytes(free)} are available")


def preparer_for(
    executor: ExecutorName,
    *,
    device: str,
    dtype: torch.dtype,
    threads: Callable[[], int],
    cache: Path,
    auditor: Auditor,
    room_bytes: Callable[[], int] = lambda: sys.maxsize,
) -> Preparer | None:
    """Return what prepares models for a device and dtype, or None where torch is to run them.

    `threads` is asked before every run of a program; 0 means all cores that the process may use. `auditor` watches what
    is prepared. `room_bytes`: what programs may take beyond what they need. Raises `ModelError` if openvino was asked
    for by name and cannot be used.
    """
    reason = _why_not(device, dtype)
    if executor is ExecutorName.TORCH or (executor is ExecutorName.AUTO and reason is not None):
        return None
    if reason is not None:
        raise ModelError(f"executor: openvino cannot be used: {reason}")
    settings = OpenVinoSettings(
        precision=_PRECISIONS[dtype],
        threads=lambda: threads() or usable_cores(),
        aside=lambda work: run_on_own_thread(lambda: _give_way(work)),
        free_bytes=lambda: min(available_bytes(torch.device("cpu")) - _LEFT_FREE_BYTES, room_bytes()),
    )
    return Preparer(OpenVinoExecutor(ProgramStore(cache), settings), auditor)


def audit_folder(cache: Path) -> Path:
    """Return where the answers of drifts are kept: beside the folder of prepared models."""
    return cache.parent / "audit"


def auditor_for(every: int, *, cache: Path, idle: Callable[[], bool]) -> Auditor:
    """Return what audits a process's programs while `idle`; the answers of drifts are kept beside `cache`.

    `every`: one call in so many, beside the first of each shape; 0: none.
    """

    return Auditor(AuditPlan(every=every, folder=audit_folder(cache)), idle=idle, on_thread=_stand_back)


def uses_graphs(executor: ExecutorName, device: torch.device) -> bool:
    """Return whether models run as CUDA graphs: on a GPU, unless torch was asked for by name."""
    return is_gpu(device) and executor is ExecutorName.AUTO


def _stand_back() -> None:
    """Leave the cores to requests, as far as they want them. The calling thread's, for good."""
    set_threads(1)
    lower_priority()


def _give_way(work: Callable[[], None]) -> None:
    """Convert at low priority: beside an ordinary thread that converts, SD 1.5's first image took three times as long
    (by hand, two cores)."""
    _stand_back()
    work()


_ONE_AT_A_TIME = threading.Lock()
"""Each converts with all cores, and takes the model's memory once more."""


def opened(preparer: Preparer | None, part: WeightedPart, computes: Computes) -> list[PreparedProgram]:
    """Return a part's programs, if all of them were converted before; else none."""
    if preparer is None:
        return []
    found = [preparer.open(part, name, compute) for name, compute in computes.items()]
    programs = [program for program in found if program is not None]
    return programs if len(programs) == len(found) else []


def convert_behind(
    preparer: Preparer,
    part: WeightedPart,
    computes: Computes,
    owner: _Owner,
    adopt: Callable[[_Owner, list[PreparedProgram]], None],
    *,
    hand_over: Callable[[Callable[[], None]], None] = lambda take_over: take_over(),
) -> Callable[[], None]:
    """Convert a part's programs on a background thread, in turn with others that wait, and have their owner `adopt`
    them, by `hand_over`; an owner is not kept in memory for that. If it fails, torch goes on serving, and the log says
    why, once. Return what takes it back if it has not begun."""
    owner_of = weakref.ref(owner)

    def make() -> None:
        if owner_of() is None:
            return
        programs = [preparer.make(part, name, compute) for name, compute in computes.items()]

        def take_over() -> None:
            if (here := owner_of()) is not None:
                adopt(here, programs)

        hand_over(take_over)

    jobs = [make]

    def run() -> None:
        with _ONE_AT_A_TIME:
            try:
                for job in jobs:
                    job()
            except (ExecutorError, ModelError, OSError) as error:
                if not background.is_ending():
                    _log.warning("%s runs on torch: %s", part.files.folder, error)
            except Exception:
                _log.exception("%s runs on torch: preparing it failed", part.files.folder)

    background.start("plait-prepare", run)
    return jobs.clear  # what was taken back is not kept until its turn


def _why_not(device: str, dtype: torch.dtype) -> str | None:
    if is_gpu(device):
        return f"it runs on CPUs, not on {device}"
    if dtype not in _PRECISIONS:
        return f"it computes in float32 or bfloat16, not in {dtype}".replace("torch.", "")
    return None if available() else "the package openvino is not installed"
