"""What is known of a Stable Diffusion 3 or FLUX.1 folder without its weights, and what brings those into memory.

Anything that could silently make wrong images (missing weights, a transformer with inputs of another kind, quantized
weights) is a `ModelError` that names the file and the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import T5EncoderModel

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.encoders import TextEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.families.flow.denoiser import FlowBundle, FlowDenoiser
from plait_serving.diffusion.families.flow.schedules import Schedules
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.knobs import Exact, ExecutorName
from plait_serving.diffusion.request_terms import RequestSize, RowKind
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.sources.file_kinds import read_json
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
        self.outline = self._outlined(folder)
        self.tokens = TextTokens(self.outline.tokenizers)
        latents = self.outline.config.get("sample_size", _NATIVE_LATENTS)
        self.width = self.height = int(latents) * self.outline.vae_factor
        self.size_multiple = self.min_whole_edge = self.outline.pixels_per_token
        self.is_made_of(self.outline)

    def _outlined(self, folder: Path) -> FlowBundle:
        """Return a folder's parts without weights; those of `may_lack` that `model_index.json` says are not there are
        left out. Raises `ModelError`."""
        index = read_json(folder / "model_index.json")
        absent = {part for part in self.may_lack if (index.get(part) or [None])[0] is None}
        kinds = {part: kind for part, kind in self.kinds.items() if part not in absent}
        for part in ("scheduler", *kinds):
            if not (folder / part).is_dir():
                raise ModelError(f"{folder / part}: missing")
        path = folder / "scheduler" / "scheduler_config.json"
        schedules = Schedules.of(read_json(path), path, even=self.even)
        for part in kinds:
            _refuse_quantized(folder / part / "config.json")
        # T5 in float16 clips, and makes other images.
        wide = frozenset(part for part in kinds if kinds[part] is T5EncoderModel and self.dtype is torch.float16)
        bundle = FlowBundle.outline(folder, kinds, wide, dtype=self.dtype, device=self.device, schedules=schedules)
        _refuse_fp8(bundle)
        return bundle

    def check_widths(self, *, channels: int, pooled: int, text: int | None) -> None:
        """Raise `ModelError` for a transformer that does not fit its VAE or text encoders."""
        path, config = self.folder / "transformer" / "config.json", self.outline.config
        wanted = {"in_channels": channels, "pooled_projection_dim": pooled, "joint_attention_dim": text}
        for key, width in wanted.items():
            if width is not None and config[key] != width:
                raise ModelError(f"{path}: {key} is {config[key]}; the other parts of the model make {width}")

    def bring(self, encoders: Sequence[TextEncoders]) -> FlowDenoiser:
        """Bring the transformer and the VAE into memory. Raises `ModelError`."""
        return self.denoiser(self.outline.loaded(), self.tokens, encoders, is_exact=self._is_exact)

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


def _refuse_quantized(path: Path) -> None:
    """Raise `ModelError` for a configuration of quantized weights, by the method's name."""
    method = read_json(path).get("quantization_config")
    if method:
        name = method.get("quant_method", "") if isinstance(method, dict) else method
        raise ModelError(f"{path}: weights quantized by {name} are not supported; F16, BF16 and F32 are")


def _refuse_fp8(bundle: FlowBundle) -> None:
    """Raise `ModelError` for weights in fp8, by the name of one."""
    for part in bundle.parts.values():
        for name, (file, info) in part.files.tensors.items():
            if info.dtype.startswith("F8"):
                raise ModelError(
                    f"{file}: {name} is {info.dtype}: an fp8 checkpoint is not supported; F16, BF16 and F32 are"
                )
