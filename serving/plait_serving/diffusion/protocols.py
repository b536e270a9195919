"""The interfaces inside the engine, and what crosses them.

Shapes: a request has n images; with classifier-free guidance (CFG) a model call sees R = 2n rows of it, the n
unconditional ones first, in diffusers' order; without CFG, R = n. L = the text's length in tokens, C = its width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.values import ImageRequest, RgbImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conditioning:
    """The inputs of a request to every step, computed once.

    `text` is `(2, L, C)` with CFG (unconditional row first) or `(1, L, C)`; `added`, by name, is what else the model
    reads, `(2|1, ...)`: of SDXL `text_embeds (2|1, P)` and `time_ids (2|1, 6)`. One row per branch: code that needs n
    rows of each branch expands them (`repeat_interleave`), so a request for 8 images sends its text once.
    """

    text: torch.Tensor
    added: Mapping[str, torch.Tensor]
    n: int

    @property
    def branches(self) -> int:
        """2 with CFG, else 1."""
        return self.text.shape[0]

    def expand(self, value: torch.Tensor) -> torch.Tensor:
        """Expand `(2|1, ...)` to `(R, ...)`: every branch's row n times."""
        return value if self.n == 1 else value.repeat_interleave(self.n, dim=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedImage:
    """What the VAE's encoder says of an image: its latents are normally distributed, each value on its own.

    `mean` and `deviation` are `(1, c, h, w)`; the model's latents are `(z - centre) * factor`.
    """

    mean: torch.Tensor
    deviation: torch.Tensor
    centre: torch.Tensor | float
    factor: torch.Tensor | float
    dtype: torch.dtype

    def sample(self, noise: torch.Tensor) -> torch.Tensor:
        """Return latents `(n, c, h, w)` for standard normal `noise (n, c, h, w)`."""
        return (self.mean + self.deviation * noise).to(self.dtype).sub(self.centre).mul(self.factor)


class Encoding(Protocol):
    """A request's prompts on their way through the text encoders. Compute thread only."""

    @property
    def calls_left(self) -> int:
        """How many text encoder calls are left to make."""

    def advance(self) -> Conditioning | None:
        """Make one text encoder call, with the weights of all others; return the conditioning if it was the last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residuals:
    """What one ControlNet adds for one request in one step, already scaled; R rows each."""

    down: tuple[torch.Tensor, ...]
    mid: torch.Tensor


ControlSession: TypeAlias = Any
"""A request's constants at a ControlNet (embedded control image, text). Opaque to the denoiser."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlCall:
    """One request's question to one ControlNet in one step. `sample (R, c, h, w)` is scaled by the sampler; `timestep`
    is 0-dim.

    `session` is what `open` returned; between processes its number, and for who computes its `Constants`. `exact`: the
    answer has the bits of diffusers' own modules over the rows it was computed with (more than these, if the ControlNet
    serves several engines); otherwise it may differ by rounding.
    """

    session: ControlSession
    sample: torch.Tensor
    timestep: torch.Tensor
    scale: float
    exact: bool = True


Answers: TypeAlias = Callable[[], list[Residuals | EngineError]]
"""Answers in flight, which were requested before the model started. Call it once: it blocks until every call of the
batch has its answer, and returns them in call order, an error for a call that failed."""


class ControlNetClient(Protocol):
    """One ControlNet, wherever it runs. All methods are called only from the engine's compute thread."""

    name: str
    """The ControlNet's name."""

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Hand over what stays constant; the control image is embedded once, here. Raises `ControlNetUnavailable`."""

    def start(self, calls: Sequence[ControlCall]) -> Answers:
        """Request one step's residuals of several requests as one batch; return before they are computed."""

    def close(self, session: ControlSession) -> None:
        """Drop a session, which is not asked in again; again does nothing."""

    def stepped(self, kind: Hashable, seconds: float) -> None:
        """Take what a step took of a request that has a session, for who chooses between places. `kind`: equal for
        steps that cost the same wherever a ControlNet runs."""
        del kind, seconds  # one place has no choice

    def shutdown(self) -> None:
        """Release channels and threads. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActiveControl:
    """A ControlNet that acts in this step. `session` was opened with `client`."""

    client: ControlNetClient
    session: ControlSession
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCall:
    """One request's part of a denoiser call. `sample (n, c, h, w)` is scaled; `timestep` is 0-dim. What the `request`
    says of guidance is the family's to read.

    A LoRA set is either an input, `loras`: its files with their scales, or `merged` into the live weights. `extra (n,
    e, h, w)`: the channels that an inpainting UNet takes beside the sample.
    """

    request: ImageRequest
    conditioning: Conditioning
    sample: torch.Tensor
    timestep: torch.Tensor
    controls: tuple[ActiveControl, ...]
    loras: tuple[tuple[LoadedLora, float], ...] = ()
    merged: bool = False
    extra: torch.Tensor | None = None


SafetyChecker: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, tuple[bool, ...]]]
"""Returns a copy of `float (n, 3, H, W)` in [0, 1] with flagged images black, and the flags. Decode thread only, in
inference mode."""


class Denoiser(Protocol):
    """A base model in memory: what its family makes of a request. Owns the weights; compute thread only.

    `finish` may be called from the decode thread while `predict` runs: it touches other modules only.
    """

    def takes(self, weights: Sequence[LoadedLora]) -> bool:
        """Return whether these files can be inputs of a step; otherwise they must be merged into the live weights.

        The answer changes only between steps."""

    def may_take(self, weights: Sequence[LoadedLora]) -> bool:
        """Return whether these files can be inputs of a step, but are merged where that is faster. Then requests
        without a set may share such a call, too."""

    @property
    def merger(self) -> Merger:
        """What merges LoRA sets into the weights that `predict` reads."""

    @property
    def text_merger(self) -> Merger:
        """What merges them into those of the text encoders."""

    @property
    def safety(self) -> SafetyChecker | None:
        """What looks at finished images; None: nothing does."""

    def sampler(self, request: ImageRequest, seeds: Sequence[int]) -> RequestSampler:
        """Return the sampler of a request's images with these seeds."""

    def begin(self, request: ImageRequest) -> Encoding:
        """Return what encodes the prompts with the live weights (text-encoder LoRAs must be merged before each
        call)."""

    @property
    def inpaints(self) -> bool:
        """Whether every call needs `extra`: mask `(n, 1, h, w)` and latents of the masked image `(n, c, h, w)`."""

    def encode(self, pixels: torch.Tensor) -> EncodedImage:
        """Encode one image, `float32 (1, 3, H, W)` in [-1, 1]."""

    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Predict all in one call: guided model output `(n, c, h, w)` per request, or the error that affects only this
        request.

        All calls agree in their request's shape (`RequestSize`) and merged set. ControlNet questions leave before the
        model starts and are awaited where it needs them; several ControlNets are summed in list order.
        Raises `torch.OutOfMemoryError` (or a `RuntimeError` naming memory) if the whole batch does not fit.
        """

    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode `(n, c, h, w)` latents to `float (n, 3, H, W)` in [0, 1], image by image."""


class RequestSampler(Protocol):
    """One request part's sampler state: one scheduler object, one CPU generator per image."""

    @property
    def timesteps(self) -> torch.Tensor:
        """`(N,)`: entry i is the 0-dim timestep that step i feeds to the model. N is the number of steps that really
        run."""

    def draw(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return standard normal `(n, c, h, w)`; image i is drawn from its own generator, which moves on."""

    def init_latents(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return `(n, c, h, w)` noise, drawn or given, scaled by the scheduler's initial sigma."""

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Return clean `latents` with as much noise as there is before step `step`: the first one, or the one that is
        taken next."""

    def scale_input(self, latents: torch.Tensor, step: int) -> torch.Tensor:
        """Return the model's input for `latents` in step `step`."""

    def step(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents after step `step`, given the guided model output."""

    def predicted_original(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the x0 estimate at step `step`, for previews; call this before `step`."""
