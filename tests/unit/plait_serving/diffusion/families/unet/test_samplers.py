"""Samplers: refused step counts, previews, seeds and independence of requests from each other."""

from __future__ import annotations

import json

import diffusers
import numpy as np
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.unet.samplers import SPACED, Sampler, sampler_of, samplers_of
from plait_serving.diffusion.families.unet.scheduler import EDM, READ, SchedulerConfig
from plait_serving.diffusion.values import Edit, Scheduler, Sigmas
from support.denoise import make_request

SHAPE = (4, 6, 5)


@pytest.fixture(scope="module", params=["epsilon", "v_prediction"])
def config(request, tiny_sd_folder) -> dict:
    """A scheduler configuration as in a folder."""
    read = json.loads((tiny_sd_folder / "scheduler" / "scheduler_config.json").read_text())
    return {**read, "prediction_type": request.param}


def make(kind: Scheduler, config: dict, *, steps: int = 5, seeds=(1, 2), **more) -> Sampler:
    """A sampler."""
    asked = make_request(scheduler=kind, steps=steps, **more)
    return sampler_of(SchedulerConfig(written=config), asked, seeds, shape=SHAPE)


def perfect(sampler: Sampler, latents: torch.Tensor, step: int, target: torch.Tensor, prediction: str) -> torch.Tensor:
    """What a model that knows the image ``target`` would predict."""
    signal, noise, scale = sampler._levels(step)
    x = latents / scale
    epsilon = (x - signal * target) / noise
    return epsilon if prediction == "epsilon" else signal * epsilon - noise * target


@pytest.mark.parametrize("kind", list(Scheduler))
def test_a_model_that_knows_the_picture_is_previewed_and_reached(kind, config):
    """With perfect predictions every preview is the image, and the last step ends near it."""
    target = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(3))
    sampler = make(kind, config, steps=8)
    latents = sampler.init_latents()
    for step in range(len(sampler.timesteps)):
        sampler.scale_input(latents, step)
        output = perfect(sampler, latents, step, target, config["prediction_type"])
        assert float((sampler.predicted_original(output, step, latents) - target).abs().max()) < 1e-3
        latents = sampler.step(output, step, latents)
    # DDIM stops at the noise level of timestep 0 (set_alpha_to_one is false in Stable Diffusion's configurations).
    assert float((latents - target).abs().max()) < (0.2 if kind is Scheduler.DDIM else 1e-3)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [(kind, steps) for kind in Scheduler for steps in (0, -1, 1001)]
    + [(Scheduler.LCM, 51), (Scheduler.DDIM, 1000), (Scheduler.DPMPP_2M, 999), (Scheduler.UNIPC, 1000)],
)
def test_step_counts_that_a_scheduler_can_not_take_are_refused(kind, steps, config):
    """A `RequestError` that names the field, where diffusers would raise an IndexError or end in NaN."""
    with pytest.raises(RequestError) as caught:
        make(kind, config, steps=steps)
    assert caught.value.param == "num_inference_steps"


OPTIONS = [
    {"prediction_type": "sample"}, {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}, {"timestep_spacing": "linspace"},
    {"beta_schedule": "squaredcos_cap_v2"}, {"trained_betas": [0.01] * 1000}, {"steps_offset": 0},
    {"lower_order_final": False}, {"lower_order_final": False, "solver_order": 3}, {"solver_order": 1},
    {"solver_type": "heun"}, {"solver_type": "bh1"}, {"solver_type": "logrho"}, {"euler_at_final": True},
    {"use_lu_lambdas": True}, {"lambda_min_clipped": -5.1}, {"disable_corrector": [0]}, {"algorithm_type": "deis"},
    {"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True},
    {"use_karras_sigmas": True, "use_exponential_sigmas": True},
    {"clip_sample": True, "clip_sample_range": 2.0}, {"thresholding": True, "dynamic_thresholding_ratio": 0.9},
    {"thresholding": True, "sample_max_value": 2.0}, {"variance_type": "fixed_large"}, {"variance_type": "learned"},
    {"set_alpha_to_one": True}, {"skip_prk_steps": True}, {"original_inference_steps": 20}, {"timestep_scaling": 1.0},
    {"flow_shift": 3.0}, {"time_shift_type": "linear"}, {"num_train_timesteps": 100}, {"beta_start": 0.01},
    {"beta_end": 0.02},
]  # fmt: skip


def _stepped(sampler: Sampler) -> torch.Tensor:
    """What an image ends as with some model."""
    latents = sampler.init_latents()
    for step in range(len(sampler.timesteps)):
        latents = sampler.step(torch.tanh(sampler.scale_input(latents, step)), step, latents)
    return latents


def _end(kind: Scheduler, config: dict, sigmas: Sigmas | None) -> torch.Tensor | str:
    """What an image ends as, or the field that a refusal names."""
    try:
        return _stepped(make(kind, config, steps=4 // kind.calls_per_step, seeds=(1,), sigmas=sigmas))
    except RequestError as error:
        return str(error.param)


@pytest.mark.parametrize("kind", list(Scheduler))
def test_whatever_a_folder_may_say_a_sampler_ends_or_refuses(kind, tiny_sd_folder):
    """No option of a folder's scheduler ends in NaN or in an error of a library, nor of those that are refused
    with a spacing that is asked for."""
    assert {key for option in OPTIONS for key in option} == READ
    config = json.loads((tiny_sd_folder / "scheduler" / "scheduler_config.json").read_text())
    for option in OPTIONS:
        for sigmas in (None, Sigmas.KARRAS) if kind in SPACED else (None,):
            end = _end(kind, {**config, **option}, sigmas)
            if not isinstance(end, str):
                assert bool(end.isfinite().all()), option
                break
            assert end == "scheduler", option


@pytest.mark.parametrize("kind", [Scheduler.DDIM, Scheduler.DDPM, Scheduler.LCM])
def test_noise_without_signal_that_is_predicted_is_refused(kind, config):
    """Only where the schedule begins there, and the model predicts the noise: x0 would be divided by zero."""
    dark = {**config, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if config["prediction_type"] == "v_prediction":
        make(kind, dark)
        return
    with pytest.raises(RequestError, match=f"{kind} cannot step with this model's rescale_betas_zero_snr") as caught:
        make(kind, dark)
    assert caught.value.param == "scheduler"


EDM_CONFIGS = {
    "EDMDPMSolverMultistepScheduler": {},
    "EDMEulerScheduler": {"sigma_max": 120.0, "sigma_data": 1.0, "sigma_schedule": "exponential"},
    "CosineDPMSolverMultistepScheduler": {"sigma_min": 0.1, "sigma_max": 80.0},
}
OWN = [
    ("EDMDPMSolverMultistepScheduler", {}, Scheduler.DPMPP_2M),
    ("EDMDPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, Scheduler.DPMPP_2M_SDE),
    ("EDMEulerScheduler", {}, Scheduler.EULER),
    ("CosineDPMSolverMultistepScheduler", {}, Scheduler.DPMPP_2M_SDE),
]


def edm(own_class: str, **more) -> SchedulerConfig:
    """An EDM model's scheduler."""
    return SchedulerConfig(written={"_class_name": own_class, **EDM_CONFIGS[own_class], **more}, own_class=own_class)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize(("own_class", "more", "own"), OWN)
def test_edm_samplers_step_as_their_class_does(own_class, more, own, prediction):
    """Whole and from the middle; the folder's own is the one of requests that name none."""
    config = edm(own_class, prediction_type=prediction, **more)
    assert samplers_of(config).default is own
    for first, edit in ((0, None), (3, Edit(image=np.zeros((8, 8, 3), np.uint8), strength=5 / 8))):
        ours = sampler_of(config, make_request(scheduler=own, steps=8, edit=edit), (1, 2), shape=SHAPE)
        theirs = getattr(diffusers, own_class).from_config(dict(config.written))
        theirs.set_timesteps(8)
        theirs.set_begin_index(first)
        generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        noise = randn_tensor((2, *SHAPE), generator=generators)
        latents, expected = ours.init_latents(), noise * theirs.init_noise_sigma
        if first:
            image = torch.full_like(noise, 0.3)
            latents, expected = ours.add_noise(image, noise, 0), theirs.add_noise(image, noise, theirs.timesteps[3:4])
        for step, timestep in enumerate(theirs.timesteps[first:]):
            given = theirs.scale_model_input(expected, timestep)
            assert torch.equal(ours.scale_input(latents, step), given)
            assert torch.equal(ours.timesteps[step], timestep)
            output = torch.tanh(given + timestep)
            expected = theirs.step(output, timestep, expected, generator=generators, return_dict=False)[0]
            latents = ours.step(output, step, latents)
            assert torch.equal(latents, expected)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("own_class", EDM_CONFIGS)
def test_an_edm_model_that_knows_the_picture_is_previewed_and_reached(own_class, prediction):
    """By every sampler that it takes; previews change nothing."""
    config = edm(own_class, prediction_type=prediction)
    target = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(3))
    data = dict(config.written).get("sigma_data", 0.5 if own_class in EDM else 1.0)
    for kind in samplers_of(config).among:
        sampler = sampler_of(config, make_request(scheduler=kind, steps=8), (1, 2), shape=SHAPE)
        latents = sampler.init_latents()
        for step in range(8):
            sampler.scale_input(latents, step)
            sigma = sampler._scheduler.sigmas[step]
            skipped = data**2 / (sigma**2 + data**2) * latents
            factor = sigma * data / (sigma**2 + data**2) ** 0.5 * (1 if prediction == "epsilon" else -1)
            output = (target - skipped) / factor
            for _ in range(2):
                assert float((sampler.predicted_original(output, step, latents) - target).abs().max()) < 1e-3
            latents = sampler.step(output, step, latents)
        assert float((latents - target).abs().max()) < 1e-3


def test_large_and_negative_seeds_work(config):
    """Any whole number is a seed; different ones differ."""
    ends = [make(Scheduler.DDIM, config, seeds=(seed,)).init_latents() for seed in (-1, 2**63, 2**64 + 5, 5)]
    assert torch.equal(ends[2], ends[3])
    assert not torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("sigmas", Sigmas)
def test_a_spacing_that_is_asked_for_replaces_the_folder_s_own(sigmas, config):
    """A folder that says Karras gets what the request says; without a wish it keeps its own."""

    def levels(config: dict, sigmas: Sigmas | None) -> torch.Tensor:
        return make(Scheduler.HEUN, config, sigmas=sigmas)._scheduler.sigmas

    karras = {**config, "use_karras_sigmas": True}
    assert torch.equal(levels(karras, sigmas), levels(config, sigmas))
    assert torch.equal(levels(karras, None), levels(config, Sigmas.KARRAS))


@pytest.mark.parametrize("kind", list(Scheduler))
def test_ordinary_step_counts_are_foretold_and_end(kind, config):
    """What a request counts before its sampler exists is what the sampler makes, also from the middle; the latents stay
    finite."""
    picture = np.zeros((48, 40, 3), np.uint8)
    for count, edit in ((1, None), (2, None), (9, None), (20, None), (9, Edit(image=picture, strength=0.55))):
        asked = make_request(scheduler=kind, steps=count, edit=edit, width=40, height=48)
        sampler = make(kind, config, steps=count, edit=edit)
        assert len(sampler.timesteps) == asked.calls
        steps = [asked.steps_after(call) for call in range(asked.calls + 1)]
        assert (steps[0], steps[-1]) == (0, asked.run_steps)
        assert sorted(set(steps)) == list(range(asked.run_steps + 1))
        assert bool(_stepped(sampler).isfinite().all())
