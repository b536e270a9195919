"""Latents of our denoisers and samplers against diffusers' own pipelines, same seeds, on tiny random models in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait_serving.diffusion.families.unet.bundle import Bundle, load_bundle, load_controlnet
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.protocols import ControlNetClient, Denoiser
from plait_serving.diffusion.values import ControlRef, ImageRequest, Scheduler
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import DenoisingRequest, control_image, make_request, max_difference, start
from support.engine_probe import fused_reference
from support.tiny import tiny_sd
from support.whole import WholeControlNet


def run_requests(
    bundle: Bundle,
    denoiser: Denoiser,
    requests: Sequence[ImageRequest],
    clients: Mapping[str, ControlNetClient] | None = None,
    *,
    joins_at: Sequence[int] | None = None,
) -> list[DenoisingRequest]:
    """Runs all to the end, batched; request k joins before round ``joins_at[k]`` (default: all before the first)."""
    running = [start(bundle, denoiser, request, clients) for request in requests]
    joins = list(joins_at or [0] * len(running))
    turn = 0
    with torch.inference_mode():
        while not all(one.done for one in running):
            now = [one for one, join in zip(running, joins, strict=True) if join <= turn and not one.done]
            turn += 1
            if now:
                for one, output in zip(now, denoiser.predict([one.call() for one in now]), strict=True):
                    one.advance(output)
    return running


CONTROLS = (
    ControlRef(name="a", image=control_image(1), scale=0.8, end=0.8),
    ControlRef(name="b", image=control_image(2, side=48), scale=1.3, start=0.2),
)


class Model:
    """A tiny family with its denoisers, ControlNets and stock pipelines (each loaded once)."""

    def __init__(self, folder: Path, nets: tuple[Path, Path], dtype: torch.dtype = torch.float32) -> None:
        self.folder, self.dtype = folder, dtype
        self.paths = dict(zip("ab", nets, strict=True))
        self.bundle = load_bundle(folder, dtype=dtype)
        self.denoiser = UNetDenoiser(self.bundle)
        self.clients = {name: self._client(name, path) for name, path in self.paths.items()}
        self._kept: dict[object, object] = {}

    def _client(self, name: str, path: Path) -> WholeControlNet:
        return WholeControlNet(name, load_controlnet(path, dtype=self.dtype))

    def reference(self, request: ImageRequest) -> torch.Tensor:
        """diffusers' latents."""
        return fused_reference(self.folder, request, controlnets=self.paths, dtype=self.dtype, kept=self._kept)

    def run(self, *requests, joins_at=None) -> list[torch.Tensor]:
        """Our latents, all requests batched."""
        done = run_requests(self.bundle, self.denoiser, requests, self.clients, joins_at=joins_at)
        assert [one.error for one in done] == [None] * len(done)
        return [one.latents for one in done]


@pytest.fixture(scope="module")
def sd(tiny_sd_folder, tiny_sd_controlnets) -> Model:
    """Tiny Stable Diffusion 1.x."""
    return Model(tiny_sd_folder, tiny_sd_controlnets)


@pytest.fixture(scope="module")
def sdxl(tiny_sdxl_folder, tiny_sdxl_controlnets) -> Model:
    """Tiny Stable Diffusion XL."""
    return Model(tiny_sdxl_folder, tiny_sdxl_controlnets)


@pytest.fixture(params=["sd", "sdxl"])
def model(request) -> Model:
    """Both families."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("guidance_scale", [5.0, 1.0])
@pytest.mark.parametrize("scheduler", [Scheduler.EULER_A, Scheduler.UNIPC])
def test_two_controlnets_with_windows_have_diffusers_latents(model, scheduler, guidance_scale):
    """Two ControlNets, each acting in a part of the steps, summed in list order: diffusers' latents."""
    request = make_request(scheduler=scheduler, guidance_scale=guidance_scale, n=2, controlnets=CONTROLS)
    assert ulps(model.run(request)[0], model.reference(request)) <= EQUAL


def test_one_controlnet_one_image_and_an_odd_size(model):
    """A single ControlNet and a size that is no multiple of the UNet's factor (17 latents high)."""
    request = make_request(controlnets=CONTROLS[:1], height=40, width=56, negative_prompt="tree")
    assert ulps(model.run(request)[0], model.reference(request)) <= EQUAL


def test_controlnets_really_change_the_latents(model):
    """Their residuals are not zero, or the tests above would prove nothing; order and windows matter too."""
    plain, controlled = make_request(), make_request(controlnets=CONTROLS)
    late = make_request(controlnets=(replace(CONTROLS[0], start=0.5), CONTROLS[1]))
    a, b, c = (model.run(request)[0] for request in (plain, controlled, late))
    assert min(max_difference(a, b), max_difference(b, c)) > 1e-2


def test_batched_requests_have_diffusers_latents(model):
    """Four requests with different schedulers, steps, seeds, prompts, ControlNets and starts: equal to diffusers."""
    schedulers = [Scheduler.LCM, Scheduler.DDIM, Scheduler.EULER_A, Scheduler.UNIPC]
    requests = [
        make_request(
            scheduler=scheduler, steps=3 + i, seed=10 * i, n=1 + i % 2, guidance_scale=1.5 + 0.5 * i,
            prompt=("cat " * i) or "a photo", controlnets=((), CONTROLS, CONTROLS[1:], ())[i],
        )
        for i, scheduler in enumerate(schedulers)
    ]  # fmt: skip
    found = model.run(*requests, joins_at=[0, 1, 2, 0])
    differences = [ulps(ours, model.reference(r)) for ours, r in zip(found, requests, strict=True)]
    assert max(differences) <= IN_COMPANY, differences


def test_bfloat16_is_no_worse_than_diffusers(sd):
    """In bf16 our error against fp32 is at most a fifth above diffusers' own bf16 error."""
    half = Model(sd.folder, tuple(sd.paths.values()), dtype=torch.bfloat16)
    asked = make_request(scheduler=Scheduler.DPMPP_2M, n=2, controlnets=CONTROLS[:1])
    other = make_request(scheduler=Scheduler.EULER, seed=99)
    truth = sd.reference(asked)

    def error(latents: torch.Tensor) -> float:
        return float((latents.float() - truth).square().mean().sqrt())

    theirs = error(half.reference(asked))
    assert error(half.run(asked)[0]) <= theirs * 1.2
    assert error(half.run(asked, other)[0]) <= theirs * 1.2


def test_a_guidance_distilled_unet_equals_diffusers(tmp_path):
    """A UNet that takes the guidance scale as an input (LCM) runs once per image, with diffusers' embedding."""
    folder = tiny_sd(tmp_path / "lcm", time_cond_proj_dim=9)
    bundle = load_bundle(folder)
    requests = [
        make_request(scheduler=Scheduler.LCM, guidance_scale=g, seed=i, n=2, steps=2) for i, g in enumerate((1.5, 8.0))
    ]
    references = [fused_reference(folder, r) for r in requests]
    denoiser = UNetDenoiser(bundle)
    alone = [run_requests(bundle, denoiser, [r])[0].latents for r in requests]
    together = [one.latents for one in run_requests(bundle, denoiser, requests)]
    assert max(map(ulps, alone, references)) <= EQUAL
    assert max(map(ulps, together, references)) <= IN_COMPANY
    assert max_difference(references[0], references[1]) > 1.0
