"""Torch has one thread between the calls of prepared programs: its workers would hold cores that those use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from plait_kernels.threads import run_on_own_thread, set_threads
from plait_serving.diffusion.families.unet.compiled import CompiledHalves
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.protocols import StepCall
from support.bundles import load_bundle
from support.denoise import make_request, prepared


class Seen(Exception):
    """Raised by a program instead of computing."""


class Program:
    """Notes torch's threads where a step would run."""

    layers = ()

    def __init__(self) -> None:
        self.threads = 0

    def run(self, *_: object, **__: object) -> None:
        self.threads = torch.get_num_threads()
        raise Seen


def test_a_prepared_step_and_decode_have_the_cores_to_themselves(tiny_sd_folder):
    """Inside one thread, afterwards as many as before; torch's own steps keep theirs."""

    def on_compute_thread() -> SimpleNamespace:
        set_threads(3)
        exact = [Exact.NEVER]
        denoiser = UNetDenoiser(load_bundle(tiny_sd_folder), exact=lambda: exact[0])
        step, decode = Program(), Program()
        denoiser.adopt(CompiledHalves(encoder=step, decoder=step))
        denoiser.adopt_vae(decode)
        request = make_request()
        latents = torch.zeros(1, *denoiser.bundle.latent_shape(request.width, request.height))
        call = StepCall(
            request=request, conditioning=prepared(denoiser, request), sample=latents, timestep=torch.tensor(1),
            controls=(), loras=(), merged=False,
        )  # fmt: skip
        with pytest.raises(Seen):
            denoiser.predict([call])
        with pytest.raises(Seen):
            denoiser.finish(latents)
        exact[0] = Exact.ALWAYS
        denoiser.predict([call])
        return SimpleNamespace(step=step.threads, decode=decode.threads, after=torch.get_num_threads())

    before = torch.get_num_threads()
    seen = run_on_own_thread(on_compute_thread)
    assert (seen.step, seen.decode, seen.after) == (1, 1, 3)
    torch.set_num_threads(before)
