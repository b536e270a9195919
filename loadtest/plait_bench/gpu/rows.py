"""One run on a device: its rows, its clock, its memory."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch

from plait_bench.benchmark import ResultRow
from plait_kernels.devices import allocated_bytes, default_device, empty_cache, is_gpu, synchronize
from plait_kernels.executors.graphs import GraphMemory, Recording, graph_memory

LARGEST_DIFFERENCE = 2e-2
"""Between two ways of computing in half precision, of the largest value: they round at different places."""


class _Again:
    """A capture for where there are no graphs: the call is made again."""

    pool_bytes = 0

    def __call__(self, call: Callable[[], None]) -> Recording:
        """Return what makes the call."""
        return SimpleNamespace(replay=call)


class GpuRun:
    """Where rows go, and what is left of the time. `tiny`: sizes at which all of it runs on a CPU."""

    def __init__(self, folder: Path, *, ends_s: float, tiny: bool) -> None:
        """Begin `rows.jsonl` and `log.txt` in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._log = folder / "rows.jsonl", folder / "log.txt"
        self._ends_s = ends_s
        self.tiny = tiny
        self.has_failed = False
        self.device = torch.empty(0, device=default_device()).device
        self.on_gpu = is_gpu(self.device)
        if tiny and not self.on_gpu:
            torch.set_num_threads(1)  # more would only wait for each other
        self.dtype = torch.float16 if self.on_gpu else torch.float32
        self._memory = None if self.on_gpu else GraphMemory(_Again(), budget_bytes=1 << 40)
        name = torch.cuda.get_device_name(self.device) if self.on_gpu else platform.processor() or "cpu"
        self._host = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "tiny": tiny}

    @property
    def left_s(self) -> float:
        """The seconds in which something may still begin."""
        return self._ends_s - time.monotonic()

    @property
    def memory(self) -> GraphMemory:
        """The memory of graphs on the device."""
        return self._memory or graph_memory(self.device)

    @property
    def rounds(self) -> int:
        """How often what is compared is measured, in turn."""
        return 3 if self.tiny else 30

    def row(self, part: str, case: str, *values: float, metric: str, unit: str, system: str = "plait") -> None:
        """Write a row of these values."""
        self.put(part, ResultRow.of(values, system=system, workload=case, metric=metric, unit=unit))

    def put(self, part: str, row: ResultRow) -> None:
        """Write a row at once."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": part, **asdict(row), **self._host}) + "\n")
        self.log(f"{part} {row.workload} {row.system} {row.metric}: {row.value:.6g} {row.unit}")

    def failed(self, part: str, why: str) -> None:
        """Write that something went wrong."""
        self.has_failed = True
        self.row(part, why[:500], 1, metric="failed", unit="")

    def log(self, text: str) -> None:
        """Write a line to the log and the terminal."""
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)

    def compared(self, part: str, case: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Write how far two answers are apart, of the largest value; more than rounding is a failure."""
        largest = float(theirs.float().abs().max())
        difference = float((ours.float() - theirs.float()).abs().max()) / max(largest, 1e-9)
        self.row(part, case, difference, metric="difference", unit="of the largest")
        if not difference <= LARGEST_DIFFERENCE:
            self.failed(part, f"{case}: ours differs by {difference:.3g} of the largest value")

    def timed(
        self, part: str, case: str, systems: Mapping[str, Callable[[], object]], *, rounds: int = 0
    ) -> dict[str, float]:
        """Measure calls in turn; write and return the median milliseconds of each."""
        taken: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(rounds or self.rounds):
            for name, call in systems.items():
                taken[name].append(self.call_ms(call))
        for name, each in taken.items():
            self.row(part, case, *each, metric="ms", unit="ms", system=name)
        return {name: statistics.median(each) for name, each in taken.items()}

    def call_ms(self, call: Callable[[], object]) -> float:
        """Return the milliseconds of one call, the device's work included."""
        synchronize(self.device)
        began_s = time.perf_counter()
        call()
        synchronize(self.device)
        return (time.perf_counter() - began_s) * 1e3

    def held_bytes(self) -> int:
        """Return what tensors take of the device."""
        return allocated_bytes(self.device) if self.on_gpu else 0

    def free(self) -> None:
        """Give back what a part has left."""
        self.memory.give_up()
        gc.collect()
        empty_cache(self.device)
