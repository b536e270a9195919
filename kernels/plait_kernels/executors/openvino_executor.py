"""Prepares modules with OpenVINO on the CPU: converted once, checked against torch, kept on disk.

A conversion that does not compute what torch does on the probe is not used. The probe's inputs and torch's answer are
kept with the converted model, so every later start is checked as well, without torch's weights in memory.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from plait_kernels.executors import MODULES, AdaptedLayer, Computation, RowFactors
from plait_kernels.executors.store import ProgramStore, content_key
from plait_kernels.executors.torch_program import TorchProgram

if TYPE_CHECKING:
    from plait_kernels.executors.openvino_program import OpenVinoProgram

_log = logging.getLogger(__name__)

FORMAT = 4
"""The layout of an entry, and what may be in it; entries of another one are converted again."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""The largest difference to torch's float32 on the probe, by precision, as a share of the largest output."""

_KEPT_EXECUTORS = 48
"""What a program keeps, for each kind of operator, of the code that OpenVINO makes for every new size: without a bound
(5,000) some megabytes of each size. With as few as 8, steps of four sizes in turns take longer."""

_PROBE_RANK = 3
_MODEL, _FACTS, _PROBE = "model.xml", "entry.json", "probe.safetensors"


def available() -> bool:
    """Return whether the `openvino` package is installed."""
    return find_spec("openvino") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVinoSettings:
    """`precision`: "float32" or "bfloat16". `threads` is asked before every run; a new number compiles anew.

    `aside` calls what converts, and returns once that is done: where it gives way to what computes meanwhile.
    `copies_bytes` and `free_bytes`: `OpenVinoProgram`.
    """

    precision: str = "float32"
    threads: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    aside: Callable[[Callable[[], None]], None] = lambda work: work()
    copies_bytes: int = 512 << 20
    free_bytes: Callable[[], int] = lambda: sys.maxsize

    def options(self) -> dict[str, Any]:
        """Return the options of `compile_model`."""
        return {
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[self.precision],
            "INFERENCE_NUM_THREADS": self.threads(),
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
            "PERFORMANCE_HINT": "LATENCY",
            "CPU_RUNTIME_CACHE_CAPACITY": _KEPT_EXECUTORS,
            "CACHE_MODE": "OPTIMIZE_SIZE",  # weights stay in the model's file (`compiled_cache`)
        }


class OpenVinoExecutor:
    """Prepares computations; `store` keeps the converted models. Thread-safe."""

    def __init__(self, store: ProgramStore, settings: OpenVinoSettings) -> None:
        self._store = store
        self._settings = settings

    @property
    def tolerance(self) -> float:
        """The largest difference to torch, as a share of an output's largest number."""
        return TOLERANCE[self._settings.precision]

    def key(self, folder: Path) -> str:
        """Return the key of what is in a folder: its configuration and its safetensors. Raises OSError."""
        files = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")]
        versions = [f"{name} {version(name)}" for name in ("openvino", "torch", "diffusers")]
        return content_key(files, [*versions, f"format {FORMAT}"])

    def open(self, key: str) -> OpenVinoProgram | None:
        """Return a program that was converted before, or None. An entry that is damaged or computes something else is
        dropped, and named in the log."""
        entry = self._store.find(key)
        if entry is None:
            return None
        try:
            return self._read(entry)
        except Exception as error:
            _log.warning("%s is not usable and will be made again: %s", entry, " ".join(str(error).split())[:300])
            self._store.drop(key)
            return None

    def prepare(self, key: str, computation: Callable[[], Computation]) -> OpenVinoProgram:
        """Return the program, converted now unless another process has done it. Raises `ExecutorError` or OSError."""
        with self._store.making(key) as write:
            found = self.open(key)
            if found is not None:
                return found
            started_s = time.perf_counter()
            entry = write(lambda folder: self._settings.aside(lambda: _fill(folder, computation)))
            _log.info("converted %s in %.1f s", key[:8], time.perf_counter() - started_s)
            try:
                return self._read(entry)
            except Exception:
                self._store.drop(key)
                raise

    def _read(self, entry: Path) -> OpenVinoProgram:
        from plait_kernels.executors.compiled_cache import CompiledCache, inline_integers
        from plait_kernels.executors.openvino_core import core
        from plait_kernels.executors.openvino_program import OpenVinoProgram, Probe

        facts = json.loads((entry / _FACTS).read_text(encoding="utf-8"))
        layers = [AdaptedLayer(**layer) for layer in facts["layers"]]
        kept = load_file(entry / _PROBE)
        inputs = _numbered(kept, "input")
        model = core().read_model(entry / _MODEL)
        inline_integers(model)
        probe = Probe(
            inputs=inputs,
            factors=_probe_factors(layers, inputs[0].shape[0]) if layers else None,
            outputs=_numbered(kept, "output"),
            tolerance=self.tolerance,
        )
        return OpenVinoProgram(
            model,
            layers,
            options=self._settings.options,
            copies_bytes=self._settings.copies_bytes,
            free_bytes=self._settings.free_bytes,
            probe=probe,
            cache=CompiledCache(entry, (entry / _MODEL).with_suffix(".bin")),
        )


def _fill(folder: Path, make: Callable[[], Computation]) -> None:
    """Write an entry: the model, what torch computes on the probe, the adapted layers."""
    from plait_kernels.executors import conversion

    with MODULES:
        computation = make()
    inputs = [value.float() for value in computation.example]
    reference = TorchProgram(computation)
    factors = _probe_factors(reference.layers, inputs[0].shape[0]) if computation.takes_factors else None
    outputs = reference.run(inputs, factors)
    model, layers = conversion.convert(computation)
    conversion.save(model, folder / _MODEL)
    tensors = {f"input.{i}": value.contiguous() for i, value in enumerate(inputs)}
    tensors |= {f"output.{i}": value.float().contiguous() for i, value in enumerate(outputs)}
    save_file({name: value.clone() for name, value in tensors.items()}, folder / _PROBE)
    (folder / _FACTS).write_text(json.dumps({"layers": [asdict(layer) for layer in layers]}), encoding="utf-8")


def _probe_factors(layers: Sequence[AdaptedLayer], rows: int) -> RowFactors:
    """Return seeded factors for every other layer, so that both kinds are checked."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int, share: int) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(*shape, generator=rng) * (0.3 / share**0.5)
        return drawn

    return RowFactors(
        rows=rows,
        by_path={
            layer.path: (
                draw(rows, layer.width_in, _PROBE_RANK, share=layer.width_in),
                draw(rows, _PROBE_RANK, layer.width_out, share=_PROBE_RANK),
            )
            for layer in layers[::2]
        },
    )


def _numbered(tensors: Mapping[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    return [tensors[f"{name}.{i}"] for i in range(sum(1 for key in tensors if key.startswith(f"{name}.")))]
