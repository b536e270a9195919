"""Packaged configurations, and dense halves whose programs are tried at once, in this thread, and win: so that a test
knows what computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from plait_disagg.dense import prepared
from plait_disagg.graph.sample_inputs import collate, for_module, sample
from plait_disagg.messages.check import check_request
from plait_disagg.models.configs import build, ids_per_bag
from plait_disagg.package.read import open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.values import RankRequest


class PackagedConfiguration:
    """One with few rows, its module and requests for it."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        self.hot = {bag: min(ids, 8) for bag, ids in ids_per_bag(name).items()}
        self.module, self.inputs = build(name, rows_scale=1e-6 if name.startswith("mlperf") else 1e-4)
        options["ids_per_bag"] = self.hot
        write_package(folder, self.module, self.inputs, name="m", options=PackageOptions(**options))
        self.package = open_package(folder)

    def requests(self, *rows: int, seed: int) -> list[RankRequest]:
        """One of so many candidates each."""
        bounds = self.package.manifest.bounds
        made = [
            sample(self.inputs, bounds, candidates=count, ids_per_bag=self.hot, seed=seed + at, ragged=True)
            for at, count in enumerate(rows)
        ]
        return [check_request(self.package.card(), tensors, request_id=f"{seed}") for tensors in made]

    def wanted(self, requests: list[RankRequest]) -> torch.Tensor:
        """The whole module's scores."""
        batch = collate(self.inputs, [one.tensors for one in requests], [one.candidates for one in requests])
        with torch.no_grad():
            made: torch.Tensor = self.module(**for_module(self.inputs, batch))
        return made


@contextmanager
def programs_win(*, torch_s: float = 2.0) -> Iterator[None]:
    """A trial finds that every program takes a second and torch `torch_s`."""

    def medians(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        for run in runs.values():
            run()
        return {"program": 1.0, "smallest": torch_s, "largest": torch_s}

    with mock.patch.object(prepared, "medians", medians):
        yield
