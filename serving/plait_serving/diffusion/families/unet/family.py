"""What is known of a Stable Diffusion folder without its weights, and what brings those into memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from plait_kernels.devices import is_gpu
from plait_kernels.executors import PreparedProgram
from plait_kernels.executors.graphs import graph_memory
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import TextEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.families.preparation import Computes, convert_behind, opened, uses_graphs
from plait_serving.diffusion.families.unet.bundle import outline_bundle
from plait_serving.diffusion.families.unet.compiled import CompiledHalves, graphed_halves, row_wise_halves
from plait_serving.diffusion.families.unet.computations import decoder_computation, encoder_computation, vae_computation
from plait_serving.diffusion.families.unet.config import UNetKind, check_controlnet
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner, load_controlnet
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.families.unet.prompt import PromptEncoder, PromptTokens
from plait_serving.diffusion.families.unet.samplers import samplers_of
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest

_CONTROL_WORK = 0.4
"""A ControlNet is a copy of the UNet's encoder half and middle: 0.36 of 0.86 billion weights in Stable
Diffusion 1.5."""
_PROGRAMS: Mapping[str, Computes] = {
    "unet": {"encoder": encoder_computation, "decoder": decoder_computation},
    "vae": {"vae-decoder": vae_computation},
}
"""What executors prepare, by part."""
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
        self._tokens = PromptTokens(self._outline.tokenizers.values(), max_words=settings.limits.max_prompt_tokens)
        self._prompts = PromptEncoder(self._outline, tokens=self._tokens)
        self._conversions: list[Callable[[], None]] = []
        self.kind = str(self._outline.kind)
        self.width, self.height = self._outline.width, self._outline.height
        self.size_multiple, self.min_whole_edge = self._outline.size_multiple, self._outline.min_whole_edge
        self.is_made_of(self._outline)
        self.working_bytes = self.decoding_bytes_per_pixel * self.width * self.height
        takes = _XL_TAKES if self._outline.kind is UNetKind.SDXL else _TAKES
        self.terms = RequestTerms(samplers=samplers_of(self._outline.scheduler_config), takes=takes)

    def measure(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError`."""
        active = sum(control.end - control.start for control in request.controlnets)
        return replace(self._prompts.size(request), controls=_CONTROL_WORK * round(active))

    def bring(self, encoders: Sequence[TextEncoders]) -> UNetDenoiser:
        """Bring the weights into memory, with the programs that were prepared before; what was not is converted behind
        what the model computes. Raises `ModelError`."""
        programs = {name: opened(self.preparer, self.parts[name], computes) for name, computes in _PROGRAMS.items()}
        mapped = frozenset(name for name, found in programs.items() if found)
        (texts,) = encoders
        bundle = replace(self._outline.loaded(mapped=mapped), encoders=texts, mapped=mapped)
        executor = self.settings.executor
        denoiser = UNetDenoiser(bundle, exact=lambda: self.host.knobs().exact, tokens=self._tokens)
        for name, found in programs.items():
            adopt = partial(_adopt, name, self.prepared)
            if found:
                adopt(denoiser, found)
            elif self.preparer is not None and self.settings.converts:
                stop = convert_behind(
                    self.preparer,
                    self.parts[name],
                    _PROGRAMS[name],
                    denoiser,
                    adopt,
                    hand_over=self.host.between_steps,
                )
                self._conversions.append(stop)
        if uses_graphs(executor, bundle.device):
            denoiser.adopt(graphed_halves(bundle.unet, graph_memory(bundle.device)))
        elif self.preparer is None and not is_gpu(bundle.device) and bundle.dtype is torch.float32:
            denoiser.adopt(row_wise_halves(bundle.unet))
        return denoiser

    def leave(self) -> None:
        """Let go of what belongs to the weights; what is not converted yet is not begun."""
        while self._conversions:
            self._conversions.pop()()
        self.prepared.difference_update(_PROGRAMS)
        super().leave()

    def why_unfit(self, folder: Path) -> str | None:
        """Return why a ControlNet is none for this model, as far as its folder says; None if it is."""
        try:
            self._check_fits(folder)
        except ModelError as error:
            return error.message
        return None

    def _check_fits(self, folder: Path) -> None:
        check_controlnet(folder, base=self._outline.config, vae_factor=self._outline.vae_factor)

    def controlnet(self, name: str, folder: Path) -> ControlNetModelRunner:
        """Load a ControlNet to run in this process. Raises `ModelError`."""
        self._check_fits(folder)
        return load_controlnet(
            folder,
            name=name,
            dtype=self.dtype,
            device=str(self.device),
            preparer=self.preparer,
            adopted=partial(self.prepared.add, name),
            graphs=uses_graphs(self.settings.executor, self.device),
        )


def _adopt(name: str, prepared: set[str], denoiser: UNetDenoiser, programs: Sequence[PreparedProgram]) -> None:
    """Have a part run on its programs, and add it to `prepared`."""
    if name == "unet":
        encoder, decoder = programs
        denoiser.adopt(CompiledHalves(encoder=encoder, decoder=decoder))
    else:
        denoiser.adopt_vae(*programs)
    prepared.add(name)
