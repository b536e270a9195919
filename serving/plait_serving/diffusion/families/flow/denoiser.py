"""A transformer that denoises behind the `Denoiser` protocol: requests stacked by rows, LoRA sets as inputs.

Torch runs diffusers' own module. A LoRA set is an input of a step: nothing is merged, so no second weights are kept,
but for files that change what takes no factors (norms, convolutions, DoRA).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from plait_kernels.attention import FasterAttention, pays
from plait_kernels.executors import AdaptedLayer, Factors, RowFactors
from plait_kernels.executors.adapters import plus_factors
from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.bundle import Bundle
from plait_serving.diffusion.families.encoders import Call, EncodedText, TextEncoders
from plait_serving.diffusion.families.factors import FactorStore
from plait_serving.diffusion.families.flow.schedules import FlowSampler, Schedules
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.families.rows import BatchLayout, Rows, guided_outputs
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.protocols import EncodedImage, Encoding, SafetyChecker, StepCall
from plait_serving.diffusion.values import ImageRequest

_COMPONENT = "transformer"
_PATCH = 2
"""A token is two by two latents."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowBundle(Bundle):
    """The parts of one model, and what its scheduler makes of requests."""

    denoiser: ClassVar[str] = _COMPONENT

    schedules: Schedules

    @property
    def pixels_per_token(self) -> int:
        """Along an edge: widths and heights must be multiples of this."""
        return _PATCH * self.vae_factor

    def tokens(self, width: int, height: int) -> int:
        """Return how many tokens an image of so many pixels is."""
        return (width // self.pixels_per_token) * (height // self.pixels_per_token)


class FlowDenoiser(ABC):
    """A `Denoiser` for a bundle. Compute thread only, except `finish`, which touches nothing but the VAE's decoder.

    A family says how texts become conditioning (`begin`), how rows run through the transformer (`run`), and the scale
    of a guidance by two rows (`scale_of`).
    """

    safety: SafetyChecker | None = None
    """These models have none."""
    inpaints = False

    def __init__(
        self,
        bundle: FlowBundle,
        tokens: TextTokens,
        encoders: Iterable[TextEncoders] = (),
        *,
        is_exact: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take the bundle, the tokens of its tokenizers, and the text encoders, which others may have, too. `is_exact`
        is asked before each call: whether it must have diffusers' bits, rather than be as near to the model."""
        self.bundle, self.tokens = bundle, tokens
        self.transformer: Any = bundle.modules[_COMPONENT]
        self.merger = Merger({_COMPONENT: bundle.modules[_COMPONENT]})
        self.encoders = {part: each for each in encoders for part in each.parts}
        self.text_merger = next((each.merger for each in self.encoders.values() if each.adapts), Merger({}))
        self._layers = {
            f"{_COMPONENT}.{path}": module
            for path, module in bundle.modules[_COMPONENT].named_modules()
            if isinstance(module, nn.Linear)
        }
        adapted = [
            AdaptedLayer(path=path, width_in=layer.in_features, width_out=layer.out_features)
            for path, layer in self._layers.items()
        ]
        self._is_exact = is_exact
        self._attention = FasterAttention() if pays(bundle.device, bundle.dtype) else None
        self._factors = FactorStore(_COMPONENT, adapted, dtype=bundle.dtype, device=bundle.device)

    def takes(self, weights: Sequence[LoadedLora]) -> bool:
        """Return whether LoRA files can be inputs of a step; otherwise they are merged into the weights."""
        return all(map(self._factors.takes, weights))

    def may_take(self, weights: Sequence[LoadedLora]) -> bool:  # noqa: ARG002
        """Return False: what can be an input is one."""
        return False

    def encoded(self, call: Call) -> EncodedText:
        """Make a text encoder call, or remember its result."""
        return self.encoders[call.part].run(call)

    def sampler(self, request: ImageRequest, seeds: Sequence[int]) -> FlowSampler:
        """Return the sampler of a request's images with these seeds. Raises `RequestError`."""
        bundle, size = self.bundle, (request.width, request.height)
        scheduler = bundle.schedules.make(
            request.scheduler,
            steps=request.steps,
            tokens=bundle.tokens(*size),
            sigmas=request.sigmas,
            device=bundle.device,
        )
        return FlowSampler(
            scheduler,
            seeds=seeds,
            shape=bundle.latent_shape(*size),
            draws=bool(scheduler.config.get("stochastic_sampling")),
            first_step=request.first_step,
            dtype=bundle.dtype,
            device=bundle.device,
        )

    @torch.inference_mode()
    def encode(self, pixels: torch.Tensor) -> EncodedImage:
        """Encode one image, `float32 (1, 3, H, W)` in [-1, 1]."""
        return self.bundle.encode(pixels)

    @torch.inference_mode()
    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode `(n, c, h, w)` latents to `float32 (n, 3, H, W)` in [0, 1], one image at a time."""
        if self.bundle.dtype is torch.bfloat16 and not self._is_exact():
            latents = latents.contiguous(memory_format=torch.channels_last)  # faster, and all that follow are, too
        return self.bundle.decode(latents)

    @torch.inference_mode()
    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Predict all rows of all requests in one call of the transformer."""
        layout = BatchLayout.of([call.conditioning for call in calls])
        (factors,) = self._factors.of([call.loras for call in calls], layout)
        faster = None if self._is_exact() else self._attention
        with self._adding(factors), faster or nullcontext():
            output = self.run(Rows.of(calls, layout))
        return guided_outputs(output, layout, [self.scale_of(call.request) for call in calls])

    @contextmanager
    def _adding(self, factors: RowFactors | None) -> Iterator[None]:
        """Have the transformer's layers add the rows' factors."""
        by_path: Mapping[str, Factors] = {} if factors is None else factors.by_path
        with ExitStack() as hooks:
            for path, pair in by_path.items():
                hooks.enter_context(self._layers[path].register_forward_hook(partial(_add, pair)))
            yield

    @abstractmethod
    def begin(self, request: ImageRequest) -> Encoding:
        """Return what encodes the prompts, with the weights that the text encoders have at each call."""

    @abstractmethod
    def run(self, rows: Rows) -> torch.Tensor:
        """Return the transformer's output `(R, c, h, w)`."""

    @abstractmethod
    def scale_of(self, request: ImageRequest) -> float:
        """Return by how much a request with two rows an image is guided."""


def _add(pair: Factors, _: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Add the factors' product: a forward hook of a linear layer."""
    return plus_factors(output, inputs[0], *pair)
