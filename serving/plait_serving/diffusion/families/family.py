"""What every family says of a model without its weights, and what brings those into memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.bundle import Bundle
from plait_serving.diffusion.families.encoders import Parts, TextEncoders
from plait_serving.diffusion.families.preparation import auditor_for, preparer_for
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.memory import check_memory, resolve_device, resolve_dtype, warn_of_emulation
from plait_serving.diffusion.protocols import ControlNetClient, Denoiser
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest


class Family(ABC):
    """One model. A family sets what is only declared here, from the folder's configurations and tokenizers.

    `weights_bytes`: what it has for itself in memory, beside the text encoders; `visiting_bytes`: the largest of those
    that comes for a text only where memory is short (`encoders`); `working_bytes`: what an image takes.

    `parts`: what its modules are loaded from, by folder; LoRAs change some. `kind` is what those and ControlNets are
    made for; sizes are in pixels: the model's own, what edges must be
    multiples of, and the smallest edge that all its levels halve evenly. `terms`: what requests may say. `prepared`:
    what runs on prepared programs now, its parts and the names of ControlNets; `preparer` makes those, None: torch runs
    all.
    """

    kind: str
    width: int
    height: int
    size_multiple: int
    min_whole_edge: int
    weights_bytes: int
    decoding_bytes_per_pixel: int
    terms: RequestTerms
    parts: Parts
    lora_targets: LoraTargets
    visiting_bytes: int = 0
    working_bytes: int = 0

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Take a model's folder. A family's own reads it. Raises `ModelError`."""
        self.folder, self.settings, self.host = folder, settings, host
        device = resolve_device(settings.device)
        self.device, self.dtype = torch.device(device), resolve_dtype(settings.dtype, device)
        if device == "cpu" and self.dtype is torch.bfloat16:
            warn_of_emulation()
        self._own: list[TextEncoders] = []
        self._encoders = self._own
        self.prepared: set[str] = set()
        self.auditor = auditor_for(settings.audit_every, cache=settings.prepared_folder, idle=host.is_idle)
        self.preparer = preparer_for(
            settings.executor,
            device=device,
            dtype=self.dtype,
            threads=lambda: host.knobs().threads,
            cache=settings.prepared_folder,
            auditor=self.auditor,
            room_bytes=host.room_bytes,
        )

    @abstractmethod
    def measure(self, request: ImageRequest) -> RequestSize:
        """Return what a request comes to. Thread-safe. Raises `RequestError` for values that the model cannot take, or
        that mean nothing together."""

    @abstractmethod
    def bring(self, encoders: Sequence[TextEncoders]) -> Denoiser:
        """Bring its own weights into memory, and return what steps them with these text encoders, which are there.
        Raises `ModelError`."""

    def is_made_of(self, outline: Bundle) -> None:
        """Take a model's parts. LoRA sets are merged into some of its text encoders."""
        self.parts, self.weights_bytes = outline.parts, outline.weights_bytes
        self.decoding_bytes_per_pixel = outline.decoding_bytes_per_pixel
        self.lora_targets = LoraTargets.of(outline.lora_components)
        self._own = self._encoders = [
            TextEncoders(parts, device=self.device, adapts=adapts, among=self.host.encoders)
            for parts, adapts in ((outline.clips, True), (outline.readers, False))
            if parts
        ]
        self.visiting_bytes = max((each.nbytes for each in self._own if not each.adapts), default=0)

    def load(self) -> Denoiser:
        """Bring the weights into memory, the text encoders' unless another model has equal ones there. Raises
        `ModelError`."""
        self._encoders = [self.host.encoders.like(each) for each in self._own]
        weights_bytes = self.weights_bytes + self.shared_bytes()
        check_memory(str(self.folder), weights_bytes, self.device, working_bytes=self.working_bytes)
        try:
            for own, each in zip(self._own, self._encoders, strict=True):
                each.hold(self, own.parts)
            return self.bring(self._encoders)
        except BaseException:
            self.leave()
            raise

    def shared_bytes(self, *, left: bool = False) -> int:
        """Return its share of the text encoders in memory that models share, or what it would bring of them. `left`:
        once those have left that can."""
        return sum(each.nbytes_for(self, left=left) for each in self._encoders)

    def leave(self) -> None:
        """Let go of what belongs to the weights, which leave."""
        for each in self._encoders:
            each.let_go(self)
        self.auditor.forget()

    def why_unfit(self, folder: Path) -> str | None:  # noqa: ARG002  # none fits
        """Return why a ControlNet is none for this model, as far as its folder says; None if it is."""
        return f"{self.kind} models take no ControlNets"

    def controlnet(self, name: str, folder: Path) -> ControlNetClient:
        """Load a ControlNet to run in this process. Raises `ModelError`."""
        raise ModelError(f"ControlNet {name}: {self.why_unfit(folder)}")
