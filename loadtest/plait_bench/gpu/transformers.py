"""FLUX.1 [dev] at its published size with random weights: a step of ours beside torch's, eager and compiled, and four
LoRA sets in one call beside four calls of torch's without any."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from plait_bench.gpu.denoisers import COMPILES_S, drawn_module
from plait_bench.gpu.rows import GpuRun
from plait_serving.diffusion.families.flow.denoiser import FlowBundle
from plait_serving.diffusion.families.flow.schedules import Schedules
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.families.flux.denoiser import FluxDenoiser, packed, positions_of, unpacked
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.protocols import Conditioning, StepCall
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.diffusion.values import ImageRequest, Scheduler
from plait_serving.random_models import DtypeName, LoraSpelling
from plait_serving.random_models.loras import write_lora

_SETS, _RANK = 4, 16


@torch.inference_mode()
def flux(run: GpuRun) -> None:
    """All blocks, images of 1024x1024, 512 tokens of text, guidance as an input."""
    edge, length = (64, 16) if run.tiny else (1024, 512)
    module = drawn_module(run, FamilyName.FLUX_DEV, "transformer")
    bundle = FlowBundle(
        folder=Path(), modules={"transformer": module}, tokenizers={}, schedules=Schedules(config={}, even=True),
        dtype=run.dtype, device=run.device,
    )  # fmt: skip
    denoiser = FluxDenoiser(bundle, TextTokens({}))

    def ours(*calls: StepCall) -> torch.Tensor:
        return torch.cat(cast("list[torch.Tensor]", denoiser.predict(calls)))

    one = _call(run, module.config, edge, length)
    theirs, case = _forward(module, one), f"{edge}x{edge} images 1"
    run.compared("flux", case, ours(one), theirs())
    run.timed("flux", case, {"plait": lambda: ours(one), "torch": theirs}, rounds=max(3, run.rounds // 3))
    calls = [replace(one, loras=((each, 1.0),)) for each in _loras(run, module)]
    case = f"{edge}x{edge} images {_SETS}, a LoRA set each"
    run.compared("flux", case, ours(*calls), torch.cat([ours(call) for call in calls]))
    systems: dict[str, Callable[[], object]] = {
        "plait": lambda: ours(*calls), "torch, one by one, no LoRAs": lambda: [theirs() for _ in calls],
    }  # fmt: skip
    run.timed("flux", case, systems, rounds=max(3, run.rounds // 6))
    if run.left_s > COMPILES_S or run.tiny:
        peer = copy.deepcopy(module, {id(each): each for each in module.parameters()})  # of the same weights
        peer.compile_repeated_blocks(fullgraph=True, **({"backend": "eager"} if run.tiny else {}))
        compiled = _forward(peer, one)
        run.row("flux", "compiling", run.call_ms(compiled) / 1e3, metric="s", unit="s", system="torch.compile")
        run.timed("flux", f"{edge}x{edge} images 1, compiled", {"plait": lambda: ours(one), "torch.compile": compiled})


def _call(run: GpuRun, config: Any, edge: int, length: int) -> StepCall:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=run.device, dtype=run.dtype)

    request = ImageRequest(
        request_id="gpu", prompt="", width=edge, height=edge, steps=1, guidance_scale=3.5, seed=1,
        scheduler=Scheduler.EULER,
    )  # fmt: skip
    text = Conditioning(
        text=normal(1, length, config.joint_attention_dim),
        added={"pooled": normal(1, config.pooled_projection_dim)},
        n=1,
    )
    sample = normal(1, config.in_channels // 4, edge // 8, edge // 8)
    timestep = torch.tensor(500.0, device=run.device)
    return StepCall(request=request, conditioning=text, sample=sample, timestep=timestep, controls=())


def _forward(module: Any, call: StepCall) -> Callable[[], torch.Tensor]:
    """Return what makes one row's call of diffusers' module, as its pipeline does."""
    text, sample = call.conditioning, call.sample
    given = {
        "hidden_states": packed(sample), "timestep": call.timestep.expand(1).to(sample.dtype) / 1000,
        "guidance": torch.full((1,), call.request.guidance_scale, device=sample.device),
        "pooled_projections": text.added["pooled"], "encoder_hidden_states": text.text,
        "txt_ids": text.text.new_zeros(text.text.shape[1], 3), "img_ids": positions_of(sample, which=0).to(sample),
    }  # fmt: skip
    return lambda: unpacked(module(**given, return_dict=False)[0], like=sample)


def _loras(run: GpuRun, module: Any) -> list[LoadedLora]:
    """Return LoRAs of all attentions."""
    architecture = (scaled_down if run.tiny else ARCHITECTURES.__getitem__)(FamilyName.FLUX_DEV)
    targets = LoraTargets.of({"transformer": module})
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(_SETS):
            path = Path(scratch) / f"{seed}.safetensors"
            write_lora(
                architecture, path, spelling=LoraSpelling.PEFT, rank=_RANK, seed=seed, dtype=DtypeName.BFLOAT16,
                report=lambda *_: None,
            )  # fmt: skip
            found.append(parse(str(seed), path, targets))
    return found
