"""Schedulers and VAEs of folders: published ones load, and what would make wrong pictures is refused by name."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import diffusers
import pytest

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.bundle import outline_bundle
from plait_serving.diffusion.families.unet.config import UNetKind, check_vae_config
from plait_serving.diffusion.families.unet.scheduler import COSINE, EDM, EDM_READ, OF_BETAS, READ, scheduler_config
from plait_serving.diffusion.values import Scheduler
from support.families import edit_json, opened

_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
_OLD = {**_BETAS, "clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
        "trained_betas": None}  # fmt: skip
_XL = {**_OLD, "interpolation_type": "linear", "prediction_type": "epsilon", "sample_max_value": 1.0,
       "timestep_spacing": "leading", "use_karras_sigmas": False}  # fmt: skip
PUBLISHED = {
    "stable-diffusion-v1-5": {"_class_name": "PNDMScheduler", **_OLD},
    "SDXL-Lightning": {
        "_class_name": "EulerDiscreteScheduler", **_XL, "timestep_spacing": "trailing", "final_sigmas_type": "zero",
        "rescale_betas_zero_snr": False, "sigma_max": None, "sigma_min": None, "timestep_type": "discrete",
        "use_beta_sigmas": False, "use_exponential_sigmas": False,
    },
    "LCM_Dreamshaper_v7": {
        "_class_name": "LCMScheduler", **_BETAS, "clip_sample": False, "clip_sample_range": 1.0,
        "dynamic_thresholding_ratio": 0.995, "original_inference_steps": 50, "prediction_type": "epsilon",
        "rescale_betas_zero_snr": False, "sample_max_value": 1.0, "set_alpha_to_one": True, "steps_offset": 1,
        "thresholding": False, "timestep_scaling": 10.0, "timestep_spacing": "leading", "trained_betas": None,
    },
}  # fmt: skip
_VAE = {
    "_class_name": "AutoencoderKL", "act_fn": "silu", "block_out_channels": [128, 256, 512, 512], "in_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "latent_channels": 4,
    "layers_per_block": 2, "norm_num_groups": 32, "out_channels": 3, "sample_size": 512,
}  # fmt: skip
AMONG = (Scheduler.EULER, Scheduler.DPMPP_2M, Scheduler.DPMPP_2M_SDE)
OTHERS = [
    "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler", "SASolverScheduler",
    "IPNDMScheduler", "DDIMParallelScheduler", "CMStochasticIterativeScheduler",
]  # fmt: skip
KEYS = [
    ("DPMSolverMultistepScheduler", "use_flow_sigmas", True),
    ("UniPCMultistepScheduler", "use_flow_sigmas", True),
    ("DEISMultistepScheduler", "use_dynamic_shifting", True),
    ("EulerDiscreteScheduler", "final_sigmas_type", "sigma_min"),
    ("DPMSolverMultistepScheduler", "final_sigmas_type", "sigma_min"),
    ("EulerDiscreteScheduler", "timestep_type", "continuous"),
    ("EulerDiscreteScheduler", "sigma_max", 700.0),
    ("EulerDiscreteScheduler", "interpolation_type", "log_linear"),
    ("UniPCMultistepScheduler", "predict_x0", False),
    ("EDMEulerScheduler", "final_sigmas_type", "sigma_min"),
]
NO_REASON = [
    ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++", "solver_order": 3, "solver_type": "heun"}),
    ("EulerDiscreteScheduler", {"sigma_data": 0.5, "use_flow_sigmas": True, "flow_shift": 3.0}),  # not its keys
    ("EulerDiscreteScheduler", {"use_karras_sigmas": True, "rescale_betas_zero_snr": True}),
    ("UniPCMultistepScheduler", {"lower_order_final": False, "solver_order": 3, "final_sigmas_type": None}),
]


def read(written: dict, name: str | None = None, kind: UNetKind = UNetKind.SDXL):
    """What is made of a scheduler's file."""
    return scheduler_config(Path("model"), written, ["diffusers", name or written["_class_name"]], kind)


@pytest.fixture
def folder(tiny_sd_folder, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(tiny_sd_folder, tmp_path / "model"))


def put(folder: Path, scheduler: dict) -> None:
    """Gives a folder another scheduler."""
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    edit_json(folder / "model_index.json", scheduler=["diffusers", scheduler["_class_name"]])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schedulers_load(name, folder):
    """As their files are."""
    put(folder, PUBLISHED[name])
    written = outline_bundle(folder).scheduler_config.written
    assert {key: written[key] for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("name", sorted(OF_BETAS))
def test_schedulers_of_noise_made_of_betas_load(name, prediction):
    """As diffusers writes them, with each thing that a model may predict."""
    kind = getattr(diffusers, name)
    written = json.loads(kind(prediction_type=prediction).to_json_string())
    assert read(written).own_class == name


@pytest.mark.parametrize("place", ["both", "file"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_schedulers_are_refused(name, place, folder):
    """By the name of the class, also where only the scheduler's own file has it."""
    put(folder, {"_class_name": name})
    if place == "file":
        edit_json(folder / "model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"])
    with pytest.raises(ModelError, match=f"{name} is not supported"):
        outline_bundle(folder)


@pytest.mark.parametrize("name", sorted(EDM | COSINE))
def test_edm_schedulers_load(name, folder):
    """As diffusers writes them, for the samplers of their noise; not as the noise of another kind of model, nor for
    what they cannot be told."""
    written = json.loads(getattr(diffusers, name)(sigma_max=90.0, sigma_data=0.7, rho=6.0).to_json_string())
    put(folder, written)
    assert outline_bundle(folder).scheduler_config.own_class == name
    assert opened(folder).terms.samplers.among == (AMONG if name in EDM else (Scheduler.DPMPP_2M_SDE,))
    for other in ("EulerDiscreteScheduler", *((EDM | COSINE) - {name} if name in COSINE else COSINE)):
        with pytest.raises(ModelError, match=f"scheduler_config.json: {name} is not supported"):
            read(written, other)
    with pytest.raises(ModelError, match="prediction_type = 'sample' is not supported"):
        read({**written, "prediction_type": "sample"})


@pytest.mark.parametrize(("name", "key", "value"), KEYS)
def test_keys_that_samplers_do_not_read_are_refused(name, key, value, folder):
    """By name; left out, null and the class' default they are no reason."""
    default = inspect.signature(getattr(diffusers, name).__init__).parameters[key].default
    for harmless in ({}, {key: None}, {key: default}):
        read({**_BETAS, "_class_name": name, **harmless})
    put(folder, {**_BETAS, "_class_name": name, key: value})
    with pytest.raises(ModelError, match=rf"scheduler_config.json: {key} = {value!r} is not supported"):
        outline_bundle(folder)


@pytest.mark.parametrize(("name", "more"), NO_REASON)
def test_keys_of_samplers_are_no_reason(name, more):
    """Those that choose among samplers, those that each sampler reads, and those that the class does not take."""
    assert read({**_BETAS, "_class_name": name, **more}).own_class == name


def test_every_key_was_looked_at():
    """A key that a new version of diffusers brings is refused until somebody has said who reads it."""
    known = READ | EDM_READ | {key for _, key, _ in KEYS}
    known |= {"self", "sigma_min", "shift_terminal", "solver_p", "noise_sampler_seed"}
    for name in OF_BETAS | EDM | COSINE:
        assert set(inspect.signature(getattr(diffusers, name).__init__).parameters) <= known, name


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        (UNetKind.SD1, {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 4}, "latents_mean"),
        (UNetKind.SDXL, {"latents_mean": [0.1] * 4}, "latents_mean"),
        (UNetKind.SDXL, {"latents_std": [2.0] * 4}, "latents_std"),
        (UNetKind.SDXL, {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 3}, "latents_mean"),
        (UNetKind.SDXL, {"shift_factor": 0.1}, "shift_factor"),
    ],
)
def test_latents_of_a_vae_that_pipelines_do_not_scale_so_are_refused(family, changes, key):
    """By name. SDXL's pipelines alone read a mean and a deviation, and only both."""
    with pytest.raises(ModelError, match=f"config.json: {key} = "):
        check_vae_config({**_VAE, **changes}, family, Path("config.json"))


def test_a_vae_of_another_class_is_refused(folder):
    """By the name of the class."""
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps({"_class_name": "AutoencoderTiny"}))
    with pytest.raises(ModelError, match="AutoencoderTiny is not supported"):
        outline_bundle(folder)


def test_every_key_of_a_vae_was_looked_at():
    """The class reads what its layers are made of, the pipelines the rest."""
    keys = set(inspect.signature(diffusers.AutoencoderKL.__init__).parameters) - {"self"}
    layers = {"in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels", "act_fn",
              "layers_per_block", "latent_channels", "norm_num_groups", "sample_size", "use_quant_conv",
              "use_post_quant_conv", "mid_block_add_attention"}  # fmt: skip
    assert keys - layers == {"scaling_factor", "shift_factor", "latents_mean", "latents_std", "force_upcast"}
