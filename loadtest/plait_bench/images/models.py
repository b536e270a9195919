"""A folder of models: the starter's layout, or that of a size whose models are written on demand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait_bench.benchmark import Say
from plait_bench.errors import BenchError
from plait_bench.images.sizes import SIZES, ImageSize

__all__ = ["LORA_RANK", "ModelFolder", "missing", "open_models", "write_missing"]

LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The paths of the base model, the ControlNets and the LoRAs, by name."""

    root: Path
    base: Path
    controlnets: Mapping[str, Path]
    loras: Mapping[str, Path]

    @property
    def lora_folder(self) -> Path:
        """The folder that holds all LoRAs."""
        return self.root / "loras"


def open_models(
    root: Path, *, controlnets: frozenset[str], loras: frozenset[str], size: ImageSize = SIZES["starter"]
) -> ModelFolder:
    """Find the models that the workloads name. Raises `BenchError` that lists what is missing."""
    folder = _folder(root, controlnets, loras, size)
    if absent := missing(folder):
        raise BenchError(f"{root} lacks {', '.join(str(path.relative_to(root)) for path in absent)}")
    return folder


def missing(folder: ModelFolder) -> list[Path]:
    """List the files that are not there, one for each model."""
    needed = [folder.base / "model_index.json", *folder.loras.values()]
    needed += [path / "config.json" for path in folder.controlnets.values()]
    return [path for path in needed if not path.is_file()]


def write_missing(
    root: Path, *, controlnets: frozenset[str], loras: frozenset[str], size: ImageSize, say: Say
) -> ModelFolder:
    """Write the models of a size that `root` lacks, with random weights, and return all. Raises `BenchError`.

    They are written by a process of its own, so that the runner needs no torch.
    """
    folder = _folder(root, controlnets, loras, size)
    commands = [[size.family, "--out", str(folder.base)]] if not (folder.base / "model_index.json").is_file() else []
    absent = [path for path in folder.controlnets.values() if not (path / "config.json").is_file()]
    commands += [[size.controlnet_family, "--out", str(path)] for path in absent]
    for seed, path in enumerate(folder.loras.values(), start=1):
        if not path.is_file():
            lora = ["--lora", "peft", "--rank", str(LORA_RANK), "--seed", str(seed)]
            commands.append([size.family, *lora, "--out", str(path)])
    folder.lora_folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        say(f"writing {command[-1]} (once)")
        whole = [sys.executable, "-m", "plait.cli.main", "models", "random", *command]
        done = subprocess.run(whole, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise BenchError(f"{command[-1]} could not be written")
    return open_models(root, controlnets=controlnets, loras=loras, size=size)


def _folder(root: Path, controlnets: frozenset[str], loras: frozenset[str], size: ImageSize) -> ModelFolder:
    return ModelFolder(
        root=root,
        base=root / size.base,
        controlnets={name: root / size.controlnets[name] for name in sorted(controlnets)},
        loras={name: root / "loras" / f"{name}.safetensors" for name in sorted(loras)},
    )
