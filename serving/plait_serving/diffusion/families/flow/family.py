"""What is known of a Stable Diffusion 3 or FLUX.1 folder without its weights, and what brings those into memory."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.families.flow.bundle import FlowBundle, load_bundle
from plait_serving.diffusion.families.flow.denoiser import FlowDenoiser
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.knobs import ExecutorName
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.request_terms import RequestSize, RowKind
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest

_log = logging.getLogger(__name__)

_NATIVE_LATENTS = 128
"""The edge that FLUX.1 was made for, whose configuration does not say."""


class FlowFamily(Family):
    """One model. Torch runs it: matrix products dominate a transformer, so an executor gains little, and its copy of
    the weights would not fit."""

    kinds: ClassVar[Mapping[str, Any]]
    """The classes of the parts that have weights, by folder."""
    even: ClassVar[bool]
    """Of its schedules (`Schedules`)."""

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Read a folder's configurations and tokenizers. Raises `ModelError`."""
        super().__init__(folder, settings, host)
        if settings.dtype == "auto" and self.dtype is torch.float16:
            self.dtype = torch.bfloat16  # what these models were trained in
        if settings.executor is ExecutorName.OPENVINO:
            _log.info("%s: torch runs it: OpenVINO runs Stable Diffusion 1, 2 and XL", folder)
        self.outline = self.bundle(outline=True)
        self.tokens = TextTokens(self.outline.tokenizers)
        latents = self.outline.config.get("sample_size", _NATIVE_LATENTS)
        self.width = self.height = int(latents) * self.outline.pixels_per_latent
        self.size_multiple = self.min_whole_edge = self.outline.pixels_per_token
        self.weights_bytes = self.outline.weights_bytes
        self.decoding_bytes_per_pixel = self.outline.decoding_bytes_per_pixel
        self.lora_targets = LoraTargets.of(self.outline.lora_components)

    @classmethod
    def components(cls, folder: Path) -> Mapping[str, nn.Module]:
        """Return the modules of a folder that LoRAs change, by component, without weights. Raises `ModelError`."""
        device = torch.device("cpu")
        outline = load_bundle(folder, cls.kinds, even=cls.even, dtype=torch.float32, device=device, outline=True)
        return outline.lora_components

    @abstractmethod
    def load(self) -> FlowDenoiser:
        """Bring the weights into memory. Raises `ModelError`."""

    def bundle(self, *, outline: bool = False) -> FlowBundle:
        """Return the parts, or their outlines."""
        return load_bundle(
            self.folder,
            self.kinds,
            even=self.even,
            dtype=self.dtype,
            device=self.device,
            outline=outline,
            tokenizers=None if outline else self.outline.tokenizers,
        )

    def check_clip(self, part: str, texts: Mapping[str, str | None]) -> None:
        """Raise `RequestError` for texts, by field, that a CLIP alone reads and that are longer than it reads."""
        room = int(self.outline.tokenizers[part].model_max_length) - 2
        for name, text in texts.items():
            self.tokens.check_fits(part, text or "", room, param=name, hint="CLIP alone reads it")

    def size_of(
        self,
        request: ImageRequest,
        texts: Mapping[str, str],
        *,
        reader: str,
        room: int,
        hint: str,
        length: int,
        is_guided: bool,
        reference: tuple[int, int] | None = None,
    ) -> RequestSize:
        """Return what a request comes to, with `texts` by field, the prompt first: the text encoder `reader` has room
        for so many words of each, and the transformer reads `length` tokens of them. `reference`: the size of its image
        as the model reads it. Raises `RequestError`; its `hint` says what gives more room."""
        if request.edit is not None:
            self.outline.schedules.check_start(request.scheduler)
        words = [self.tokens.check_fits(reader, text, room, param=name, hint=hint) for name, text in texts.items()]
        pixels = [(request.width, request.height), *([reference] if reference else [])]
        rows = 2 if is_guided else 1
        return RequestSize(
            prompt_tokens=words[0],
            negative_tokens=sum(words[1:]),
            chunks=rows,
            shape=(request.width, request.height, length, reference),
            row=RowKind(length + sum(self.outline.tokens(*size) for size in pixels)),
            rows=rows,
        )
