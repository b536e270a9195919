"""`plait models random`: a published architecture with random weights, or a LoRA for one, as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.errors import PlaitError
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.random_models.loras import write_lora
from plait_serving.random_models.names import DtypeName, LoraSpelling
from plait_serving.random_models.write import Report, write_model


@dataclass(frozen=True, kw_only=True)
class RandomLora:
    """Which LoRA to write instead of a model."""

    spelling: LoraSpelling
    rank: int


def write(
    family: FamilyName, out: Path, *, seed: int, dtype: DtypeName, lora: RandomLora | None, report: Report
) -> None:
    """Write a model's folder, or a LoRA's file. Raises `PlaitError` or `EngineError`."""
    architecture = ARCHITECTURES[family]
    try:
        if lora is None:
            write_model(architecture, out, seed=seed, dtype=dtype, report=report)
        else:
            write_lora(architecture, out, spelling=lora.spelling, rank=lora.rank, seed=seed, dtype=dtype, report=report)
    except OSError as error:
        raise PlaitError(f"{error.filename or out}: {error.strerror or error}") from error
