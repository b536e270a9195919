"""`python -m starter_training`: make the starter models from scratch, or resume a run that stopped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from plait.cli.main import main as plait
from plait_serving.starter.manifest import WEIGHTS
from starter_training.base import build_studio, train_base, train_text
from starter_training.controlnets import train_controlnet
from starter_training.data import DEFAULT_COUNT, NpmUnavailableError, TrainingImages, load_images
from starter_training.export import export_base, export_controlnet, export_lora, export_rest, training_notes
from starter_training.loop import FULL, STAGES, Plan, StageOutcome, override, smoke_plan
from starter_training.loras import train_lora
from starter_training.text import build_tokenizer
from starter_training.vae import train_decoder, train_vae

# More than data.FAVOURED, few enough that a smoke run is quick.
SMOKE_COUNT = 40


def train_all(
    images: TrainingImages, plan: Plan, work: Path, out: Path, stages: tuple[str, ...]
) -> dict[str, StageOutcome]:
    """Train `stages` in order (the first four always) as far as their checkpoints in `work` are incomplete, write the
    bundle to `out`, and return each stage's outcome."""
    outcomes: dict[str, StageOutcome] = {}
    vae, outcomes["vae"] = train_vae(images, plan["vae"], work / "vae.pt")
    outcomes["decoder"] = train_decoder(vae, images, plan["decoder"], work / "decoder.pt")
    studio = build_studio(images, vae, build_tokenizer(images.names))
    outcomes["text"] = train_text(studio, plan["text"], work / "text.pt")
    outcomes["base"] = train_base(studio, plan["base"], work / "base.pt")
    export_base(studio, out)
    for name in ("edges", "colors"):
        if name in stages:
            net, outcomes[name] = train_controlnet(studio, name, plan[name], work / f"{name}.pt")
            export_controlnet(net, name, out)
    for name in ("noto", "sketch", "pixel"):
        if name in stages:
            tensors, done = train_lora(studio, name, plan, work)
            outcomes |= done
            export_lora(tensors, name, out)
    export_rest(images, training_notes(plan, outcomes), out)
    return outcomes


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
