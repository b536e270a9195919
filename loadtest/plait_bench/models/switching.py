"""Four base models of real size in one engine that has memory for two, measured: requests for them in turn.

`plait` gets all requests at once and orders them itself. `fifo` is the same engine asked for one request after another,
as a server works that loads what the next request wants.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload
from plait_bench.errors import BenchError

if TYPE_CHECKING:
    from plait_serving.diffusion.assemble import Assembled
    from plait_serving.diffusion.values import ImageRequest

__all__ = ["Switching"]

_MODELS = 4
_ROOM = 2
_REQUESTS = 8
_STEPS = 2
_TIMEOUT_S = 600.0


class Switching(Workload):
    """Random models of an architecture, written once into `root`; images of `edge` pixels."""

    systems = ("plait", "fifo")
    ours = "plait"
    pairs = (("plait", "fifo"),)
    metrics: Mapping[str, Metric] = {
        "images_per_s": Metric(unit="images/s", better="higher"),
        "loads": Metric(unit="loads", better="lower"),
        "load_s": Metric(unit="s", better="lower"),
    }

    def __init__(self, name: str, root: Path, *, family: str, edge: int) -> None:
        self.name, self._root, self._family, self._edge = name, root, family, edge
        self._assembled: Assembled | None = None

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Write the models that are missing, and open the engine that both systems use. Raises `BenchError`."""
        folders = {f"model{seed}": self._root / f"{self._family}-{seed}" for seed in range(_MODELS)}
        for seed, folder in enumerate(folders.values()):
            if not (folder / "model_index.json").is_file():
                say(f"writing {folder} (once)")
                command = ["models", "random", self._family, "--seed", str(seed), "--out", str(folder)]
                done = subprocess.run(
                    [sys.executable, "-m", "plait.cli.main", *command], stdout=subprocess.DEVNULL, check=False
                )
                if done.returncode != 0:
                    raise BenchError(f"{folder} could not be written")
        self._assembled = _opened(folders)
        try:
            yield
        finally:
            self._assembled.engine.stop(drain_s=0.0)

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make a system's subject."""
        yield _InTurn(self, at_once=system == "plait")

    def run(self, number: int, *, at_once: bool) -> list[Reading]:
        """Make the images of a round."""
        assert self._assembled is not None
        engine, names = self._assembled.engine, list(self._assembled.models)
        requests = [self._request(names[i % len(names)], seed=1000 * number + i) for i in range(_REQUESTS)]
        before, started_s = engine.residents.statistics().loads, time.perf_counter()
        with ThreadPoolExecutor(len(requests) if at_once else 1) as callers:
            list(callers.map(lambda request: engine.generate(request, timeout_s=_TIMEOUT_S), requests))
        wall_s = time.perf_counter() - started_s
        after = engine.residents.statistics()
        return [
            Reading(metric="images_per_s", value=len(requests) / wall_s),
            Reading(metric="loads", value=float(after.loads - before)),
            Reading(metric="load_s", value=max(after.load_s.values())),
        ]

    def _request(self, model: str, *, seed: int) -> ImageRequest:
        from plait_serving.diffusion.values import ImageRequest, Scheduler

        return ImageRequest(
            request_id=f"{model}-{seed}", prompt="a photo", width=self._edge, height=self._edge, steps=_STEPS,
            guidance_scale=5.0, seed=seed, scheduler=Scheduler.EULER, model=model,
        )  # fmt: skip


def _opened(folders: Mapping[str, Path]) -> Assembled:
    """Open the engine with room for some of the models; torch runs them, so that nothing is converted beside."""
    import torch

    from plait_serving.diffusion.assemble import EngineSettings, build_engine_of
    from plait_serving.diffusion.bundle import load_bundle
    from plait_serving.diffusion.knobs import ExecutorName
    from plait_serving.diffusion.memory import memory_of
    from plait_serving.diffusion.residents.base_model import resolve_dtype

    settings = {
        name: EngineSettings(model=folder, dtype="float32", device="cpu", executor=ExecutorName.TORCH, converts=False)
        for name, folder in folders.items()
    }
    one = load_bundle(next(iter(folders.values())), dtype=resolve_dtype("float32", "cpu"), outline=True).weights_bytes
    process = memory_of(torch.device("cpu"), excluded=lambda: 0).held_bytes()
    return build_engine_of(settings, memory_bytes=process + int((_ROOM + 0.5) * one))


class _InTurn:
    """Implements `Subject`."""

    def __init__(self, workload: Switching, *, at_once: bool) -> None:
        self._workload, self._at_once = workload, at_once

    def warm_up(self) -> None:
        """Do nothing: both systems use one engine, and a round makes several images."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Make the images of round `number`."""
        return self._workload.run(number, at_once=self._at_once)
