"""`python -m starter_training`: make the starter models from scratch, or resume a run that stopped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from plait.cli.main import main as plait
from plait_serving.starter.manifest import WEIGHTS
from starter_training.data import DEFAULT_COUNT, NpmUnavailableError, load_images
from starter_training.plan import FULL, STAGES, override, smoke_plan
from starter_training.stages import train_all

# More than data.FAVOURED, few enough that a smoke run is quick.
SMOKE_COUNT = 40


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m starter_training", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/plait/starter"), help="npm archives")
    parser.add_argument("--work", type=Path, help="checkpoints; default: below the cache")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="where the bundle goes")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated; the first four always run")
    parser.add_argument("--set", action="append", default=[], metavar="STAGE.FIELD=N", help="change one recipe")
    parser.add_argument("--threads", type=int, help="threads for torch")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps a stage on few images, to see that all of it runs"
    )
    parser.add_argument("--verify", action="store_true", help="measure the bundle afterwards; JSON on stdout")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, export and, if requested, measure. Exit code 0 ok, 1 failed, 2 usage, 99 a figure missed its bound."""
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    cache = options.cache.expanduser()
    try:
        plan = override(smoke_plan() if options.smoke else FULL, options.set)
        stages = tuple(options.stages.split(","))
        if unknown := set(stages) - set(STAGES):
            raise ValueError(f"unknown stages: {sorted(unknown)}; known: {', '.join(STAGES)}")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        images = load_images(cache, SMOKE_COUNT if options.smoke else DEFAULT_COUNT)
    except NpmUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    work = options.work or cache / ("smoke" if options.smoke else "checkpoints")
    train_all(images, plan, work, options.out, stages)
    return plait(["models", "verify", "--folder", str(options.out), "--json"]) if options.verify else 0


if __name__ == "__main__":
    sys.exit(main())
