"""Dense halves of ranking models, as graphs and as torch runs them: equality, and milliseconds of a batch."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch

from plait_bench.gpu.rows import GpuRun
from plait_disagg.graph.program import USER_OF
from plait_disagg.messages.check import check_request
from plait_disagg.models.configs import build, ids_per_bag, random_request
from plait_disagg.package.read import open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.queue.batch import user_of

_MODELS = ("rm3", "mlperf-dcnv2", "rm1", "rm2")
_ROWS = (64, 512, 4096)
_TABLES = 1e-4
"""Of their rows: the dense half does not see them."""


def dense(run: GpuRun) -> None:
    """Package each, and run what its HN runs."""
    for name in _MODELS[: 1 if run.tiny else None]:
        if run.left_s <= 0:
            return
        with tempfile.TemporaryDirectory() as scratch:
            _measured(run, name, Path(scratch) / name)


def _measured(run: GpuRun, name: str, folder: Path) -> None:
    module, inputs = build(name, rows_scale=_TABLES)
    hot = {bag: min(ids, 8) for bag, ids in ids_per_bag(name).items()}
    write_package(folder, module, inputs, name=name, options=PackageOptions(ids_per_bag=hot))
    package = open_package(folder)
    eager, graphs = (package.dense(run.device, prepares=prepares) for prepares in (False, True))
    sparse, manifest = package.sparse(), package.manifest
    for rows in _ROWS[: 1 if run.tiny else None]:
        drawn = random_request(
            manifest.inputs, manifest.bounds, model=name, candidates=rows, ids_per_bag=hot, alpha=1.2, seed=rows
        )
        given = dict(sparse.run([check_request(package.card(), drawn.tensors, request_id="gpu")]))
        given[USER_OF] = user_of((rows,))
        systems = {"plait": partial(graphs.run, given, (rows,)), "torch": partial(eager.run, given, (rows,))}
        for _ in range(3):
            graphs.run(given, (rows,))
        case = f"{name} rows {rows}"
        ours, theirs = graphs.run(given, (rows,)), eager.run(given, (rows,))
        for output, value in theirs.items():
            run.compared("dense", f"{case} {output}", torch.as_tensor(ours[output]), torch.as_tensor(value))
        run.timed("dense", case, systems)
