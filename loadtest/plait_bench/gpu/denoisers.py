"""UNets at their published sizes with random weights: ours beside torch's, eager and compiled, a guided step each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from plait_bench.gpu.rows import GpuRun
from plait_serving.diffusion.families.unet.compiled import CompiledHalves, graphed_halves
from plait_serving.diffusion.families.unet.fused import Fusion, fuse_
from plait_serving.diffusion.families.unet.halves import EncoderOutput, time_embedding
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.configs import build_on_meta
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.random_models.write import drawn_weights

COMPILES_S = 100.0
"""Left for a peer that is compiled: its blocks take about a minute."""


def drawn_module(run: GpuRun, family: FamilyName, folder: str = "unet") -> Any:
    """Return a part of a family's architecture on the device, with random weights: the same in every process."""
    architecture = scaled_down(family) if run.tiny else ARCHITECTURES[family]
    (part,) = (it for it in architecture.parts if it.folder == folder)
    module: nn.Module = build_on_meta(part).to(run.dtype).to_empty(device=run.device)
    random = torch.Generator(run.device).manual_seed(0)
    weights = module.state_dict()
    for each in drawn_weights(part, module):
        weights[each.key].normal_(each.mean, each.std, generator=random)
    return module.to(memory_format=torch.channels_last).eval().requires_grad_(requires_grad=False)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuidedInputs:
    """What a guided step of some images is given."""

    sample: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    added: Mapping[str, torch.Tensor]

    @classmethod
    def drawn(cls, run: GpuRun, config: Any, images: int) -> GuidedInputs:
        """Draw them, at the model's own size."""
        rows, side = 2 * images, int(config.sample_size)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=run.device, dtype=run.dtype)

        added = {}
        if config.addition_embed_type == "text_time":
            pooled = int(config.projection_class_embeddings_input_dim) - 6 * int(config.addition_time_embed_dim)
            ids = torch.tensor([8.0 * side, 8.0 * side, 0, 0, 8.0 * side, 8.0 * side])
            added = {"text_embeds": normal(rows, pooled), "time_ids": ids.to(run.device, run.dtype).expand(rows, -1)}
        return cls(
            sample=normal(rows, int(config.in_channels), side, side),
            timesteps=torch.full((rows,), 501.0, device=run.device),
            text=normal(rows, 77, int(config.cross_attention_dim)),
            added=added,
        )


@dataclass(slots=True, eq=False)
class GuidedUNet:
    """One UNet, as diffusers runs it and as plait does."""

    unet: Any
    fusion: Fusion
    halves: CompiledHalves

    @classmethod
    def made(cls, run: GpuRun, family: FamilyName) -> GuidedUNet:
        """Draw one."""
        unet = drawn_module(run, family)
        return cls(unet, fuse_(unet), graphed_halves(unet, run.memory))

    def eager(self, given: GuidedInputs) -> torch.Tensor:
        """diffusers' forward pass."""
        self.fusion.enabled = False
        return forward(self.unet, given)

    def first_half(self, given: GuidedInputs) -> EncoderOutput:
        """What ControlNets run beside."""
        self.fusion.enabled = True
        embedding = time_embedding(
            self.unet, given.sample, given.timesteps, given.text, added=given.added, guidance=None
        )
        return self.halves.encode(given.sample, embedding, given.text, None)

    def ours(self, given: GuidedInputs) -> torch.Tensor:
        """A step through both graphs."""
        return self.halves.decode(self.first_half(given), None)

    def warm(self, run: GpuRun, given: GuidedInputs) -> None:
        """Capture the graphs for these inputs."""
        for _ in range(2):
            self.ours(given)
        while run.memory.capture_waiting():
            pass


def forward(unet: Any, given: GuidedInputs) -> torch.Tensor:
    """Return a UNet's output as diffusers asks for it."""
    made = unet(
        given.sample, given.timesteps, encoder_hidden_states=given.text,
        added_cond_kwargs=dict(given.added) or None, return_dict=False,
    )  # fmt: skip
    output: torch.Tensor = made[0]
    return output


@torch.no_grad()
def sdxl(run: GpuRun) -> None:
    """Stable Diffusion XL at 1024x1024, and its compiled peer."""
    _family(run, "sdxl", FamilyName.SDXL)


@torch.no_grad()
def sd15(run: GpuRun) -> None:
    """Stable Diffusion 1.5 at 512x512."""
    _family(run, "sd15", FamilyName.SD15)


def _family(run: GpuRun, part: str, family: FamilyName) -> None:
    one = GuidedUNet.made(run, family)
    before, first = run.held_bytes(), GuidedInputs.drawn(run, one.unet.config, 1)
    for images in (1, 2, 4, 8)[: 2 if run.tiny else None]:
        if run.left_s <= 0:
            return
        given = first if images == 1 else GuidedInputs.drawn(run, one.unet.config, images)
        one.warm(run, given)
        case = f"images {images}"
        run.compared(part, case, one.ours(given), one.eager(given))
        systems = {"plait": partial(one.ours, given), "torch": partial(one.eager, given)}
        run.timed(part, case, systems, rounds=0 if images == 1 else max(3, run.rounds // 3))
        if images == 1 and (run.left_s > COMPILES_S or run.tiny):
            _compiled(run, part, family, one, first)
        del given, systems
    _memory(run, part, before, first)


def _compiled(run: GpuRun, part: str, family: FamilyName, one: GuidedUNet, given: GuidedInputs) -> None:
    """Compile the repeated blocks of another UNet, as diffusers' documentation says, and time it in turn with ours."""
    peer = drawn_module(run, family)
    how = {"backend": "eager"} if run.tiny else {"mode": "reduce-overhead", "fullgraph": True}
    peer.compile_repeated_blocks(**how)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return forward(peer, given)

    taken_ms = sum(run.call_ms(step) for _ in range(3))
    run.row(part, "images 1", taken_ms / 1e3, metric="compile_s", unit="s", system="torch.compile")
    run.compared(part, "images 1, compiled", step(), one.eager(given))
    found = run.timed(part, "images 1", {"plait": lambda: one.ours(given), "torch.compile": step})
    ratio = found["plait"] / found["torch.compile"]
    run.row(part, "images 1", ratio, metric="ratio", unit="plait/torch.compile")


def _memory(run: GpuRun, part: str, before: int, first: GuidedInputs) -> None:
    """Write what graphs hold by our own count, and by the allocator's."""
    memory = run.memory
    inputs = sum(it.nbytes for it in (first.sample, first.text, first.timesteps, *first.added.values()))
    run.row(part, "graphs", memory.graphs, metric="graphs", unit="graphs")
    run.row(part, "graphs", memory.nbytes, metric="buffers", unit="bytes")
    run.row(part, "graphs", memory.capture.pool_bytes, metric="pool", unit="bytes")
    if run.on_gpu:
        held = run.held_bytes() - before - inputs
        run.row(part, "graphs", held, metric="held", unit="bytes")
        run.row(part, "graphs", torch.cuda.max_memory_allocated(run.device), metric="peak", unit="bytes")
