"""Packaged configurations, kept between runs: half a gigabyte of tables each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from plait_bench.cache import cache_folder
from plait_disagg.models.configs import build, ids_per_bag
from plait_disagg.package import PackageError, PackageOptions, open_package, write_package

__all__ = ["SEED", "packaged"]

SEED = 0


def packaged(model: str, scale: float, *, say: Callable[[str], None]) -> Path:
    """Return the folder of a configuration's package, which is made if it is missing or no longer readable."""
    folder = cache_folder() / "disagg" / f"{model}-{scale:g}"
    try:
        open_package(folder)
        return folder
    except PackageError:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"packaging {model} with {scale:g} of its rows into {folder} (once)")
    module, inputs = build(model, rows_scale=scale, seed=SEED)
    write_package(folder, module, inputs, name="model", options=PackageOptions(ids_per_bag=ids_per_bag(model)))
    return folder
