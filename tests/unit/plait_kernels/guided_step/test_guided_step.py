"""A guided step: the definition against diffusers' schedulers, every form against fp64."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from plait_kernels.guided_step import ddim, euler, reference, triton_impl
from support.kernels import DTYPES, ROW_SHAPES, check_step, fuzz, step_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = {"reference": reference.guided_step, "triton": triton_impl.guided_step}


@pytest.fixture(params=FORMS)
def guided_step(request: pytest.FixtureRequest):
    """Every form."""
    return FORMS[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_every_form_is_the_formula(guided_step, shape, dtype):
    """One rounding from fp64; every image by its own numbers."""
    check_step(guided_step, step_case(shape, dtype, DEVICE))


@pytest.mark.parametrize("kind", [DDIMScheduler, EulerDiscreteScheduler])
def test_it_is_diffusers_guidance_and_step(guided_step, kind):
    """All steps of a schedule, each from diffusers' own latents."""
    config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = kind(**config, **({"clip_sample": False} if kind is DDIMScheduler else {}))
    scheduler.set_timesteps(6)
    output, latents, *_ = step_case((2, 4, 5, 3), torch.float32, "cpu")
    for i, timestep in enumerate(scheduler.timesteps):
        unconditional, conditional = output.chunk(2)
        guided = unconditional + 7.5 * (conditional - unconditional)
        if kind is DDIMScheduler:
            before = int(timestep) - scheduler.config.num_train_timesteps // 6
            last = scheduler.final_alpha_cumprod
            following = scheduler.alphas_cumprod[before] if before >= 0 else last
            a, b = ddim(float(scheduler.alphas_cumprod[int(timestep)]), float(following))
        else:
            a, b = euler(float(scheduler.sigmas[i]), float(scheduler.sigmas[i + 1]))
            scheduler.scale_model_input(latents, timestep)
        expected = scheduler.step(guided, timestep, latents, return_dict=False)[0]
        numbers = (torch.full((2,), value).to(DEVICE) for value in (7.5, a, b))
        got = guided_step(output.to(DEVICE), latents.to(DEVICE), *numbers).cpu()
        assert torch.allclose(got, expected, atol=2e-5, rtol=2e-5)
        latents = expected


def test_shapes_that_do_not_fit_are_refused(guided_step):
    """Output that is not two branches, or numbers that are not one per image."""
    output, latents, scale, a, b = step_case((2, 4), torch.float32, DEVICE)
    for case in ((output[:3], latents, scale, a, b), (output, latents, scale[:1], a, b)):
        with pytest.raises(ValueError, match=r"twice|numbers each"):
            guided_step(*case)


@fuzz
@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.sampled_from(DTYPES), st.integers(0, 99), st.booleans())
def test_forms_do_not_differ(shape, dtype, seed, turned):
    """All forms on any shape, and on latents whose memory runs the other way."""
    case = step_case(shape, dtype, DEVICE, seed=seed)
    if turned:
        case = (case[0].mT.contiguous().mT, case[1].mT.contiguous().mT, *case[2:])
    for form in FORMS.values():
        check_step(form, case)
