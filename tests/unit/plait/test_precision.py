"""What `images.dtype: auto` means on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import PlaitError
from plait.precision import with_dtype
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.sources import hub
from plait_serving.images.config import ImagesSection
from support.tensor_headers import write_header

GAINS, TOO_SMALL = 300_000_000, 100_000_000
COMMIT = "0" * 40


def model_of(folder: Path, nbytes: int) -> Path:
    """Make a folder whose UNet has two files of so many bytes together; they take no room on the disk."""
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    for part in (1, 2):
        with (folder / "unet" / f"diffusion_pytorch_model-0000{part}-of-00002.safetensors").open("wb") as file:
            file.truncate(nbytes // 2)
    return folder


def section(model: Path | str, **fields: object) -> ImagesSection:
    return ImagesSection.model_validate({"model": str(model), **fields})


def dtype_of(images: ImagesSection, devices: Path, *, native: bool = True) -> str:
    return with_dtype(images, devices=devices, native=lambda: native).dtype


@pytest.mark.parametrize(
    ("nbytes", "native", "fields", "dtype"),
    [
        (GAINS, True, {}, "bfloat16"),
        (GAINS, True, {"device": "cpu"}, "bfloat16"),
        (GAINS, False, {}, "float32"),
        (TOO_SMALL, True, {}, "float32"),
        (GAINS, True, {"knobs": {"exact": "always"}}, "float32"),
        (GAINS, True, {"dtype": "float32"}, "float32"),
        (TOO_SMALL, False, {"dtype": "bfloat16"}, "bfloat16"),
        (GAINS, True, {"device": "cuda"}, "auto"),
        (GAINS, True, {"num_gpus": 0.5}, "auto"),
    ],
)
def test_auto_is_bfloat16_where_it_is_native_and_pays(
    tmp_path: Path, nbytes: int, native: bool, fields: dict[str, object], dtype: str
) -> None:
    """A dtype that was asked for stays; what runs on a GPU is settled there; diffusers' bits are float32's."""
    images = section(model_of(tmp_path / "model", nbytes), **fields)
    assert dtype_of(images, tmp_path / "dev", native=native) == dtype


def test_a_link_that_leads_nowhere_stops_nobody(tmp_path: Path) -> None:
    """The model is left out when it is loaded, with its reason, and others are served."""
    folder = model_of(tmp_path / "model", GAINS)
    (folder / "unet" / "diffusion_pytorch_model.fp16.safetensors").symlink_to("../../blobs/1")
    assert dtype_of(section(folder), tmp_path / "dev") == "bfloat16"


def test_a_machine_with_a_gpu_settles_nothing(tmp_path: Path) -> None:
    """The replica sees whether it may use the GPU; by the device's name alone nobody can tell."""
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidia0").touch()
    model = model_of(tmp_path / "model", GAINS)
    assert dtype_of(section(model), devices) == "auto"
    assert dtype_of(section(model, device="cpu"), devices) == "bfloat16"


@pytest.mark.parametrize(("nbytes", "dtype"), [(GAINS, "bfloat16"), (TOO_SMALL, "float32")])
@pytest.mark.parametrize(("names", "rest"), [
    (("model.diffusion_model.a", "model.diffusion_model.b"), {"cond_stage_model.c": GAINS}),
    (("double_blocks.0.a", "single_blocks.0.b"), {}),
])  # fmt: skip
def test_of_a_checkpoint_in_one_file_the_model_that_steps_counts(
    tmp_path: Path, names: tuple[str, ...], rest: dict[str, int], nbytes: int, dtype: str
) -> None:
    """By its header, however large the rest is; FLUX.1's may be nothing else."""
    write_header(tmp_path / "model.safetensors", {**dict.fromkeys(names, nbytes // 2), **rest})
    assert dtype_of(section(tmp_path / "model.safetensors"), tmp_path / "dev") == dtype


def test_a_folder_without_a_unet_is_left_to_the_loader(tmp_path: Path) -> None:
    """Which says what is missing."""
    assert dtype_of(section(tmp_path / "nothing"), tmp_path) == "float32"


def test_a_hub_id_is_judged_by_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fetched if need be, so that the first start and the second one compute alike."""
    model, asked = model_of(tmp_path / "snapshot", GAINS), []
    monkeypatch.setattr(hub, "fetch_from_hub", lambda *key: asked.append(key) or model)
    assert dtype_of(section("someone/model", revision=COMMIT), tmp_path) == "bfloat16"
    assert asked == [("someone/model", COMMIT)]


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Ray is started for nothing."""

    def fail(*_: str) -> Path:
        raise ModelError("someone/model: cannot be downloaded: no route")

    monkeypatch.setattr(hub, "fetch_from_hub", fail)
    with pytest.raises(PlaitError, match="cannot be downloaded: no route"):
        dtype_of(section("someone/model", revision=COMMIT), tmp_path)
