"""`python -m plait_bench.zoo.judge [VARIANT ...]`, run where the libraries are: package every model, or those named,
and compare it; JSON lines."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from plait_bench.zoo.adapted import Built
from plait_bench.zoo.by_hand import BY_HAND
from plait_disagg.graph.capture import capture
from plait_disagg.graph.costs import value_bytes
from plait_disagg.graph.errors import GraphError
from plait_disagg.graph.execute import Compiled, compile_program
from plait_disagg.graph.program import Program
from plait_disagg.graph.sample_inputs import collate, for_module, id_bounds, sample
from plait_disagg.graph.store import load_program
from plait_disagg.graph.verify import run_halves
from plait_disagg.package.errors import PackageError
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.tables.reference import SeparateTables

__all__: list[str] = []

_LIBRARIES = ("deepctr", "rechub", "recbole", "torchrec")
_CANDIDATES, _REQUESTS = 100, 100
_ALIKE = 1e-3
"""The standard deviation of scores from which on a wrong one would show."""


def _main() -> None:
    torch.set_num_threads(1)
    for library in _LIBRARIES:
        variants: Mapping[str, Callable[[], Built]] = import_module(f"plait_bench.zoo.{library}").VARIANTS
        for name, build in variants.items():
            if sys.argv[1:] and name not in sys.argv[1:]:
                continue
            with contextlib.redirect_stdout(sys.stderr):
                found = _judged(name, build)
            print(json.dumps(found), flush=True)


def _judged(name: str, build: Callable[[], Built]) -> dict[str, Any]:
    """Return the facts about one variant: bytes, seconds, and the max difference of scores; or why it is refused."""
    torch.manual_seed(0)
    module, inputs = build()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        started_s = time.perf_counter()
        try:
            write_package(folder, module, inputs, name="model", options=PackageOptions(candidates=_CANDIDATES))
        except (GraphError, PackageError) as error:
            return {"variant": name, "refused": str(error)}
        taken_s = time.perf_counter() - started_s
        cn, hn = (load_program((folder / f"{half}.json").read_text(encoding="utf-8")) for half in ("cn", "hn"))
        constants = load_file(folder / "constants.safetensors")
    captured = capture(module, inputs)
    tables = SeparateTables(captured.tables)
    rows = {key: int(table.shape[0]) for key, table in captured.tables.items()}
    bounds = id_bounds(captured.program, rows, captured.constants)
    halves = compile_program(cn, constants, tables), compile_program(hn, constants)
    compared = [_difference(module, inputs, halves, bounds, seed) for seed in range(_REQUESTS)]
    spread = float(torch.cat([scores for _, scores in compared]).std())
    if not spread > _ALIKE:
        return {"variant": name, "refused": f"its scores are all alike (spread {spread:.1g}): nothing was compared"}
    return {
        "variant": name,
        "crossing_bytes": _crossing(cn),
        "by_hand_bytes": BY_HAND[name],
        "package_s": taken_s,
        "spread": spread,
        "millionths": max(difference for difference, _ in compared) * 1e6,
    }


def _difference(
    module: torch.nn.Module, inputs: Any, halves: tuple[Compiled, Compiled], bounds: Mapping[str, int], seed: int
) -> tuple[float, torch.Tensor]:
    """Return the max difference of any score of one request, of 2 to 101 candidates, and the module's scores."""
    candidates = 2 + seed
    request = sample(inputs, bounds, candidates=candidates, seed=seed)
    batch = collate(inputs, [request], [candidates])
    with torch.no_grad():
        made = module(**for_module(inputs, batch))
    wanted = list(made.values()) if isinstance(made, Mapping) else list(made) if isinstance(made, tuple) else [made]
    got = run_halves(*halves, batch).values()
    difference = max(float((one - other).abs().max()) for one, other in zip(wanted, got, strict=True))
    return difference, torch.cat([score.reshape(-1) for score in wanted])


def _crossing(cn: Program) -> int:
    sizes = value_bytes(cn, candidates=_CANDIDATES, ids_per_bag={})
    return sum(sizes[ref.name] for _, ref in cn.outputs)


if __name__ == "__main__":
    _main()
