"""Fakes of the engine's interfaces, small enough to reason about: a denoiser whose images are arithmetic.

`FakeDenoiser` predicts `0.1 * sample + seed-free constants`, so a unit's final latents show exactly which steps ran
with which LoRA set; it also records every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from fakes.terms import ALL_TERMS
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.errors import EngineError, LoraError, NumericalError
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.protocols import (
    Conditioning,
    EncodedImage,
    RequestSampler,
    StepCall,
)
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms, RowKind
from plait_serving.diffusion.values import ImageRequest, LoraSet, Tenant


class EveryBatchPays(StepCosts):
    """Says that all calls take as long, so that whatever may share one does: on a busy host one that was measured slow
    would be avoided."""

    def step_s(self, key: GroupKey, rows: int) -> float:
        """Return the same seconds for every call."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeWeights:
    """A LoRA that has a name and nothing else."""

    name: str
    nbytes: int = 1
    token: int = 0
    touches_text_encoder: bool = False


@dataclass(slots=True, eq=False)
class FakeMerger:
    """Records the sets that were made live; refuses names in `broken`."""

    current: LoraSet = ()
    history: list[LoraSet] = field(default_factory=list)
    broken: frozenset[str] = frozenset()
    cost_s: float = 0.001

    def switch_cost_s(self, target: LoraSet) -> float:
        """Return `cost_s`."""
        return self.cost_s

    def switch(self, target: LoraSet, weights: Mapping[str, FakeWeights]) -> None:
        """Record the switch; raise `LoraError` for a broken name or for weights that were not handed over."""
        for lora in target:
            if lora.name in self.broken or lora.name not in weights:
                raise LoraError(f"{lora.name} cannot be merged")
        self.current = target
        self.history.append(target)


@dataclass(slots=True, eq=False)
class FakeLease:
    """A lease that counts its releases, and that nobody else wants."""

    weights: Mapping[str, FakeWeights]
    releases: int = 0
    is_asked_back: bool = False

    def release(self) -> None:
        """Count the release."""
        self.releases += 1

    def give_back(self) -> None:
        """Do nothing."""


class FakeProvider:
    """LoRAs by name. Names in `held` load only when `arrive` is called; names in `failing` fail at once."""

    def __init__(
        self,
        names: Sequence[str] = (),
        *,
        held: Sequence[str] = (),
        failing: Sequence[str] = (),
        text: Sequence[str] = (),
    ) -> None:
        """Take the names. `tokens` are those of the files that the names stand for now; 0 if a name is not in it."""
        self.names = set(names)
        self.held = set(held)
        self.failing = set(failing)
        self.text = set(text)
        self.leases: list[FakeLease] = []
        self.waiting: list[tuple[list[str], Future[FakeLease]]] = []
        self.closed = False
        self.tokens: dict[str, int] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def acquire(self, names: Sequence[str], tenant: Tenant) -> Future[FakeLease]:
        """Return a future that is done unless a name is held or failing."""
        future: Future[FakeLease] = Future()
        if self.failing.intersection(names):
            future.set_exception(LoraError(f"{names[0]} is corrupt"))
        elif self.held.intersection(names):
            self.waiting.append((list(names), future))
        else:
            self._deliver(names, future)
        return future

    def update_turns(self) -> None:
        """Do nothing."""

    def arrive(self) -> None:
        """Deliver everything that was held."""
        waiting, self.waiting = self.waiting, []
        for names, future in waiting:
            if future.set_running_or_notify_cancel():
                self._deliver(names, future)

    def _deliver(self, names: Sequence[str], future: Future[FakeLease]) -> None:
        weights = {
            name: FakeWeights(name=name, token=self.tokens.get(name, 0), touches_text_encoder=name in self.text)
            for name in names
        }
        lease = FakeLease(weights)
        self.leases.append(lease)
        future.set_result(lease)

    def reconfigure(self, *, host_bytes: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Record that it was closed."""
        self.closed = True


@dataclass(slots=True, eq=False)
class FakeSampler:
    """Starts from `seed` in every element; a step adds the model output."""

    seeds: Sequence[int]
    shape: tuple[int, int, int]
    count: int

    @property
    def timesteps(self) -> torch.Tensor:
        """`count` descending integers."""
        return torch.arange(self.count, 0, -1)

    def draw(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return `(n, c, h, w)` filled with the seeds."""
        return torch.stack([torch.full(self.shape, float(seed)) for seed in self.seeds]).to(dtype)

    def init_latents(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return the noise."""
        return self.draw() if noise is None else noise

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Add the noise."""
        return latents + noise

    def scale_input(self, latents: torch.Tensor, step: int) -> torch.Tensor:
        """Return the latents unchanged."""
        return latents

    def step(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Add the model output."""
        return latents + output

    def predicted_original(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents unchanged."""
        return latents


def fake_samplers(request: ImageRequest, seeds: Sequence[int], shape: tuple[int, int, int]) -> FakeSampler:
    """Make a `FakeSampler`; this is a `SamplerFactory`."""
    return FakeSampler(seeds, shape, request.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """One denoiser call as the fake received it: the merged set and, per request, timestep and the sum of scales that
    were inputs."""

    loras: LoraSet
    timesteps: tuple[int, ...]
    inputs: tuple[float, ...]


@dataclass(slots=True, eq=False)
class FakeEncoding:
    """Encodes the text as the prompt's trouble, a call for each chunk; its length is 77 for each. `encoding_gate` (if
    given) is called before every call, with the request."""

    denoiser: FakeDenoiser
    request: ImageRequest
    calls_left: int

    def advance(self) -> Conditioning | None:
        """Make one call."""
        if self.denoiser.encoding_gate is not None:
            self.denoiser.encoding_gate(self.request)
        if self.request.prompt == "unencodable":
            raise ValueError("no")
        self.calls_left -= 1
        if self.calls_left:
            return None
        request = self.request
        self.denoiser.encoded.append((request.prompt, self.denoiser.text_merger.current))
        size = size_of(request)
        text = torch.full((size.row.branches, 77 * size.chunks, 1), float(_TROUBLE.get(request.prompt, 0)))
        return Conditioning(text=text, added={}, n=request.n)


def size_of(request: ImageRequest) -> RequestSize:
    """Count words, of which ten are a chunk, and two branches with guidance."""
    words, negative = (len((text or "").split()) for text in (request.prompt, request.negative_prompt))
    branches, chunks = 2 if request.guidance_scale > 1.0 else 1, 1 + words // 10
    return RequestSize(
        words={"prompt": words, "negative_prompt": negative},
        chunks=chunks,
        shape=(request.width, request.height, branches),
        row=RowKind(request.width * request.height, branches),
    )


def key_of(request: ImageRequest, loras: LoraSet = ()) -> GroupKey:
    """Return the group of a request whose set is merged."""
    size = size_of(request)
    return GroupKey(size.shape, size.row, loras)


class FakeDenoiser:
    """Adds 1 per step without LoRAs and 1 + the sum of scales with them. Prompts choose the failure:

    "nan" fails its row, "boom" raises, "memory" is too large for any batch of more than one. `gate` (if given) is
    called before every call: tests use it to stop the compute thread at a step boundary. Files named in `taken` are
    inputs, all others must be merged; text encoders have a merger of their own, `text_merger`.
    """

    safety = None

    def __init__(self, merger: FakeMerger, text_merger: FakeMerger, gate: Callable[[], None] | None = None) -> None:
        self.merger = merger
        self.text_merger = text_merger
        self.gate = gate
        self.encoding_gate: Callable[[ImageRequest], None] | None = None
        self.taken: set[str] = set()
        self.calls: list[SeenCall] = []
        self.encoded: list[tuple[str, LoraSet]] = []

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return one channel, an eighth of the size."""
        return 1, height // 8, width // 8

    def takes(self, weights: Sequence[FakeWeights]) -> bool:
        """Return whether all files are in `taken`."""
        return self.taken.issuperset(one.name for one in weights)

    def may_take(self, weights: Sequence[FakeWeights]) -> bool:
        """Return False: what is not taken is merged."""
        return False

    def sampler(self, request: ImageRequest, seeds: Sequence[int]) -> RequestSampler:
        """Return what `fake_samplers` makes."""
        return fake_samplers(request, seeds, self.latent_shape(request.width, request.height))

    def begin(self, request: ImageRequest) -> FakeEncoding:
        """Encode as `FakeEncoding` does."""
        return FakeEncoding(self, request, calls_left=size_of(request).chunks)

    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Add as the class docstring describes."""
        if self.gate is not None:
            self.gate()
        codes = tuple(float(call.conditioning.text[0, 0, 0]) for call in calls)
        if _TROUBLE["memory"] in codes and len(calls) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if _TROUBLE["boom"] in codes:
            raise ValueError("boom")
        steps = tuple(int(call.timestep) for call in calls)
        inputs = tuple(float(sum(scale for _, scale in call.loras)) for call in calls)
        self.calls.append(SeenCall(loras=self.merger.current, timesteps=steps, inputs=inputs))
        merged = 1.0 + sum(lora.scale for lora in self.merger.current)
        return [
            NumericalError("nan") if code == _TROUBLE["nan"] else torch.full_like(call.sample, merged + added)
            for call, code, added in zip(calls, codes, inputs, strict=True)
        ]

    inpaints = False

    def encode(self, pixels: torch.Tensor) -> EncodedImage:
        """Return the red of every eighth pixel, 0 to 255, as latents without deviation."""
        mean = (pixels[:, :1, ::8, ::8] + 1) * 127.5
        return EncodedImage(mean=mean, deviation=torch.zeros_like(mean), centre=0.0, factor=1.0, dtype=mean.dtype)

    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Return `latents / 255` in all three channels, eight times as large: pixel values are the latents' values."""
        images = (latents / 255.0).expand(-1, 3, -1, -1)
        return images.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)


_TROUBLE = {"nan": 1, "boom": 2, "memory": 3}


@dataclass(slots=True, eq=False)
class FakeFamily:
    """A family whose model is always in memory."""

    denoiser: FakeDenoiser
    weights_bytes: int = 1
    terms: RequestTerms = ALL_TERMS
    width: int = 16
    height: int = 16
    visiting_bytes: int = 0

    def shared_bytes(self, *, left: bool = False) -> int:
        """Share nothing."""
        return 0

    def measure(self, request: ImageRequest) -> RequestSize:
        """Count as `size_of` does."""
        return size_of(request)

    def load(self) -> FakeDenoiser:
        """Return the denoiser."""
        return self.denoiser

    def leave(self) -> None:
        """Do nothing."""


def resident_model(
    denoiser: FakeDenoiser,
    *,
    clock: Callable[[], float],
    loras: FakeProvider,
    costs: StepCosts,
) -> Model:
    """Return a model over fakes that is in memory."""
    model = Model(
        name="fake",
        family=FakeFamily(denoiser),
        limits=ImageLimits(),
        loras=loras,
        costs=costs,
        clock=clock,
    )
    model.stepper = model.load()
    return model
