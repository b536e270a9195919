"""A folder of models laid out as the starter's: `emoji/`, `controlnets/NAME/`, `loras/NAME.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait_bench.errors import BenchError

BASE = "emoji"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The paths of the base model, the ControlNets and the LoRAs, by name."""

    root: Path
    base: Path
    controlnets: Mapping[str, Path]
    loras: Mapping[str, Path]


def open_models(root: Path, *, controlnets: frozenset[str], loras: frozenset[str]) -> ModelFolder:
    """Find the models that the workloads name. Raises `BenchError` that lists what is missing."""
    folder = ModelFolder(
        root=root,
        base=root / BASE,
        controlnets={name: root / "controlnets" / name for name in sorted(controlnets)},
        loras={name: root / "loras" / f"{name}.safetensors" for name in sorted(loras)},
    )
    needed = [folder.base / "model_index.json", *folder.loras.values()]
    needed += [path / "config.json" for path in folder.controlnets.values()]
    missing = [str(path.relative_to(root)) for path in needed if not path.is_file()]
    if missing:
        raise BenchError(f"{root} lacks {', '.join(missing)}")
    return folder
