"""What is known of a Stable Diffusion folder without its weights, and what brings those into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plait_kernels.devices import is_gpu
from plait_kernels.executors.graphs import graph_memory
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import TextEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.families.preparation import uses_graphs
from plait_serving.diffusion.families.unet.bundle import components_of, loaded, outline_bundle
from plait_serving.diffusion.families.unet.compiled import graphed_halves, row_wise_halves
from plait_serving.diffusion.families.unet.config import UNetKind, check_controlnet
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.families.unet.programs import UNetPrograms
from plait_serving.diffusion.families.unet.prompt import PromptEncoder
from plait_serving.diffusion.families.unet.prompt_tokens import PromptTokens
from plait_serving.diffusion.families.unet.samplers import samplers_of
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest

_CONTROL_WORK = 0.4
"""A ControlNet is a copy of the UNet's encoder half and middle: 0.36 of 0.86 billion weights in Stable
Diffusion 1.5."""
_TAKES = frozenset(("guidance_scale", "guidance_rescale", "negative_prompt", "prompt_syntax", "clip_skip"))
_XL_TAKES = _TAKES | {"prompt_2", "negative_prompt_2", "original_size", "target_size", "crop"}


class UNetFamily(Family):
    """Stable Diffusion 1.x, 2.x and XL."""

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Read a folder's configurations and tokenizers. Raises `ModelError`."""
        super().__init__(folder, settings, host)
        self._outline = outline_bundle(
            folder, dtype=self.dtype, device=str(self.device), safety_checker=settings.safety_checker
        )
        self.parts = self._outline.parts
        self._tokens = PromptTokens(self._outline.tokenizers, max_words=settings.limits.max_prompt_tokens)
        self._prompts = PromptEncoder(self._outline, tokens=self._tokens)
        self._stop_converting: Callable[[], None] = lambda: None
        self.kind = str(self._outline.kind)
        self.width, self.height = self._outline.width, self._outline.height
        self.size_multiple, self.min_whole_edge = self._outline.size_multiple, self._outline.min_whole_edge
        self.weights_bytes = self._outline.weights_bytes
        self.decoding_bytes_per_pixel = self._outline.decoding_bytes_per_pixel
        self.working_bytes = self.decoding_bytes_per_pixel * self.width * self.height
        self.reads_with(self._outline.texts, {})
        takes = _XL_TAKES if self._outline.kind is UNetKind.SDXL else _TAKES
        self.terms = RequestTerms(samplers=samplers_of(self._outline.scheduler_config), takes=takes)
        self.lora_targets = LoraTargets.of(components_of(self._outline))

    def measure(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError`."""
        active = sum(control.end - control.start for control in request.controlnets)
        return replace(self._prompts.size(request), controls=_CONTROL_WORK * round(active))

    def bring(self, encoders: Sequence[TextEncoders]) -> UNetDenoiser:
        """Bring the weights into memory, with the programs that were prepared before; what was not is converted behind
        what the model computes. Raises `ModelError`."""
        programs = UNetPrograms(self.preparer, self.parts)
        bundle = loaded(self._outline, *encoders, mapped=programs.mapped)
        executor = self.settings.executor
        denoiser = UNetDenoiser(bundle, exact=lambda: self.host.knobs().exact, tokens=self._tokens)
        programs.adopt(denoiser, self.prepared)
        if uses_graphs(executor, bundle.device):
            denoiser.adopt(graphed_halves(bundle.unet, graph_memory(bundle.device)))
        elif self.preparer is None and not is_gpu(bundle.device) and bundle.dtype is torch.float32:
            denoiser.adopt(row_wise_halves(bundle.unet))
        if self.settings.converts:
            self._stop_converting = programs.convert_behind(self.host.between_steps, denoiser, self.prepared)
        return denoiser

    def leave(self) -> None:
        """Let go of what belongs to the weights; what is not converted yet is not begun."""
        self._stop_converting()
        self.prepared -= {"unet", "vae"}
        super().leave()

    def why_unfit(self, folder: Path) -> str | None:
        """Return why a ControlNet is none for this model, as far as its folder says; None if it is."""
        try:
            check_controlnet(folder, base=self._outline.config, vae_factor=self._outline.vae_factor)
        except ModelError as error:
            return error.message
        return None

    def controlnet(self, name: str, folder: Path) -> ControlNetModelRunner:
        """Load a ControlNet to run in this process. Raises `ModelError`."""
        return load_controlnet(
            folder,
            base=self._outline.config,
            vae_factor=self._outline.vae_factor,
            dtype=self.dtype,
            device=str(self.device),
            preparer=self.preparer,
            adopted=partial(self.prepared.add, name),
            graphs=uses_graphs(self.settings.executor, self.device),
        )
