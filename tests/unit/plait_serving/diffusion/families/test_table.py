"""Which family serves a folder, by the class of its pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families import family_row


def folder_of(tmp_path: Path, pipeline: str | None) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return tmp_path


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("KandinskyPipeline", "KandinskyPipeline is not supported; StableDiffusion3"),
        ("FluxFillPipeline", "FluxFillPipeline is not supported: FLUX.1 Fill has inputs of its own"),
        ("FluxControlPipeline", "FLUX.1 Canny and Depth have an input of their own"),
        ("FluxControlNetPipeline", "a ControlNet of FLUX.1 in a pipeline"),
        ("StableDiffusion3ControlNetPipeline", "a ControlNet of Stable Diffusion 3 in a pipeline"),
        ("FluxPriorReduxPipeline", "FLUX.1 Redux turns images into prompts"),
        (None, "names no pipeline"),
    ],
)
def test_a_pipeline_that_no_family_serves_is_refused_by_name(tmp_path: Path, pipeline: str | None, reason: str) -> None:
    """Those that look like one that is served are told what differs."""
    with pytest.raises(ModelError, match=reason) as refused:
        family_row(folder_of(tmp_path, pipeline))
    assert "model_index.json" in refused.value.message


def test_a_kind_is_told_without_the_weights(tiny_sd_folder: Path, tiny_sdxl_folder: Path) -> None:
    """Of the folder's configuration."""
    assert [family_row(folder).kind(folder) for folder in (tiny_sd_folder, tiny_sdxl_folder)] == ["sd1", "sdxl"]
