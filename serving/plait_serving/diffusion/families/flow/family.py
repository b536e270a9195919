"""What is known of a Stable Diffusion 3 or FLUX.1 folder without its weights, and what brings those into memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import TextEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.families.flow.bundle import OWN, FlowBundle, loaded, outline_bundle
from plait_serving.diffusion.families.flow.denoiser import FlowDenoiser
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.knobs import Exact, ExecutorName
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.memory import PROCESS_BYTES, MemoryNeed, check_memory
from plait_serving.diffusion.request_terms import RequestSize, RowKind
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest

_NATIVE_LATENTS = 128
"""The edge that FLUX.1 was made for, whose configuration does not say."""


class FlowFamily(Family):
    """One model. Torch runs it: matrix products dominate a transformer, so an executor gains little, and its copy of
    the weights would not fit."""

    kinds: ClassVar[Mapping[str, Any]]
    """The classes of the parts that have weights, by folder."""
    may_lack: ClassVar[Collection[str]] = ()
    """Those without which a model is whole."""
    denoiser: ClassVar[type[FlowDenoiser]]
    even: ClassVar[bool]
    """Of its schedules (`Schedules`)."""

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Read a folder's configurations and tokenizers. Raises `ModelError`."""
        if settings.executor is ExecutorName.OPENVINO:
            raise ModelError(f"{folder}: executor: openvino cannot be used: it runs Stable Diffusion 1, 2 and XL only")
        super().__init__(folder, settings, host)
        if settings.dtype == "auto" and self.dtype is torch.float16:
            self.dtype = torch.bfloat16  # what these models were trained in
        self._is_torch = settings.executor is ExecutorName.TORCH
        self.outline = self._outlined(folder, self.dtype, self.device)
        self.tokens = TextTokens(self.outline.tokenizers)
        latents = self.outline.config.get("sample_size", _NATIVE_LATENTS)
        self.width = self.height = int(latents) * self.outline.pixels_per_latent
        self.size_multiple = self.min_whole_edge = self.outline.pixels_per_token
        self.weights_bytes = sum(self.outline.parts[name].nbytes for name in OWN)
        self._own = [
            TextEncoders(parts, device=self.device, adapts=adapts, among=host.encoders)
            for parts, adapts in ((self.outline.clips, True), (self.outline.readers, False))
            if parts
        ]
        self._encoders = self._own
        self.visiting_bytes = max((each.nbytes for each in self._own if not each.adapts), default=0)
        self.decoding_bytes_per_pixel = self.outline.decoding_bytes_per_pixel
        self.lora_targets = LoraTargets.of(self.outline.lora_components)

    @classmethod
    def components(cls, folder: Path) -> Mapping[str, nn.Module]:
        """Return the modules of a folder that LoRAs change, by component, without weights. Raises `ModelError`."""
        return cls._outlined(folder, torch.float32, torch.device("cpu")).lora_components

    @classmethod
    def _outlined(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> FlowBundle:
        return outline_bundle(folder, cls.kinds, may_lack=cls.may_lack, even=cls.even, dtype=dtype, device=device)

    def load(self) -> FlowDenoiser:
        """Bring the weights into memory, the text encoders' unless another model has equal ones there. Raises
        `ModelError`."""
        self._encoders = [self.host.encoders.like(each) for each in self._own]
        need = MemoryNeed(weights_bytes=self.weights_bytes + self.shared_bytes(), allowance_bytes=PROCESS_BYTES)
        check_memory(str(self.folder), need, self.device)
        try:
            for own, each in zip(self._own, self._encoders, strict=True):
                each.hold(self, own.parts)
            return self.denoiser(loaded(self.outline), self.tokens, self._encoders, is_exact=self._is_exact)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Let go of what belongs to the weights, which leave."""
        for each in self._encoders:
            each.let_go(self)
        super().leave()

    def shared_bytes(self, *, left: bool = False) -> int:
        """Return what its text encoders take, as far as it counts for this model."""
        return sum(each.nbytes_for(self, left=left) for each in self._encoders)

    def _is_exact(self) -> bool:
        return self._is_torch or self.host.knobs().exact is Exact.ALWAYS

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
        """Return what a request comes to, with `texts` by field: the text encoder `reader` has room
        for so many words of each, and the transformer reads `length` tokens of them. `reference`: the size of its image
        as the model reads it. Raises `RequestError`; its `hint` says what gives more room."""
        words = {
            name: self.tokens.check_fits(reader, text, room, param=name, hint=hint) for name, text in texts.items()
        }
        pixels = [(request.width, request.height), *([reference] if reference else [])]
        rows = 2 if is_guided else 1
        return RequestSize(
            words=words,
            chunks=rows,
            shape=(request.width, request.height, length, reference),
            row=RowKind(length + sum(self.outline.tokens(*size) for size in pixels)),
            rows=rows,
        )
