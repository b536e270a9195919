"""A family that nobody made: images of coloured blocks, one to each latent.

Its component, its kind and its pipeline have names that nothing else has, guidance is made of two rows, texts are
bytes that are filled up to a length, and LoRAs are merged. So whatever works with it was not asked which family it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from safetensors.torch import save_file
from torch import nn

from plait_serving.diffusion.errors import EngineError, RequestError
from plait_serving.diffusion.families import FamilyRow
from plait_serving.diffusion.families.encoders import TextEncoders, WeightedPart
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.families.rows import BatchLayout, Rows, guided_outputs
from plait_serving.diffusion.loading import outline_module
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.protocols import Conditioning, EncodedImage, StepCall
from plait_serving.diffusion.request_terms import RequestSize, RequestTerms, RowKind, SamplerChoice
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.values import ImageRequest, Scheduler
from plait_serving.diffusion.weight_files import find_weights
from support.tiny import seeded

MIXER, TEXT = "mixer", "text_encoder"
BLOCK, CHANNELS, WIDTH, LENGTH = 4, 3, 8, 16


class Mixer(ModelMixin, ConfigMixin):
    """Changes each block by its colour, the time and the text."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(CHANNELS + 1, WIDTH)
        self.words = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, CHANNELS)

    def forward(self, sample: torch.Tensor, times: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return `(R, c, h, w)` for `sample (R, c, h, w)`, `times (R,)` and `text (R, L, C)`."""
        blocks = sample.movedim(1, -1)
        time = times.view(-1, 1, 1, 1).expand(*blocks.shape[:-1], 1)
        hidden = self.inner(torch.cat([blocks, time], dim=-1)) + self.words(text).mean(dim=1)[:, None, None]
        return self.outer(torch.tanh(hidden)).movedim(-1, 1)


class Bytes(ModelMixin, ConfigMixin):
    """Reads bytes."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return `(1, L, C)` for `ids (1, L)`."""
        return self.out(self.table(ids))


KINDS = {MIXER: Mixer, TEXT: Bytes}
"""Both modules, by component."""


class BlocksFamily(Family):
    """One model."""

    kind = "blocks"

    def __init__(self, folder: Path, settings: EngineSettings, host: Host) -> None:
        """Look what is in a folder. Raises `ModelError`."""
        super().__init__(folder, settings, host)
        self.width = self.height = 8 * BLOCK
        self.size_multiple = self.min_whole_edge = BLOCK
        self.parts = {part: WeightedPart(kind, find_weights(folder / part), self.dtype) for part, kind in KINDS.items()}
        self.weights_bytes = sum(part.nbytes for part in self.parts.values())
        self.decoding_bytes_per_pixel = 12
        self.terms = RequestTerms(
            samplers=SamplerChoice(among=(Scheduler.EULER,)),
            takes=frozenset({"guidance_scale", "max_sequence_length"}),
            steps=6,
            guidance_scale=2.0,
            edits=False,
        )
        self.lora_targets = LoraTargets.of(
            {name: outline_module(part.kind, part.files, part.dtype) for name, part in self.parts.items()}
        )

    def measure(self, request: ImageRequest) -> RequestSize:
        """Count bytes and blocks."""
        words, length = len(request.prompt.encode()), length_of(request)
        if words > length:
            raise RequestError(f"{words} bytes are more than {length}", param="max_sequence_length")
        rows = 2 if is_guided(request) else 1
        blocks = request.width * request.height // BLOCK**2
        return RequestSize(
            words={"prompt": words},
            chunks=rows,
            shape=(request.height, request.width, length),
            row=RowKind(blocks + length),
            rows=rows,
        )

    def bring(self, encoders: Sequence[TextEncoders]) -> BlocksDenoiser:  # its text is its own
        """Read the weights."""
        return BlocksDenoiser({name: part.load(self.device) for name, part in self.parts.items()})


class BlocksDenoiser:
    """Steps it."""

    inpaints, safety = False, None

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._mixer, self.text = modules[MIXER], modules[TEXT]
        self.merger, self.text_merger = Merger({MIXER: self._mixer}), Merger({TEXT: self.text})

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """A block has a colour."""
        return CHANNELS, height // BLOCK, width // BLOCK

    def takes(self, weights: Sequence[LoadedLora]) -> bool:
        """LoRAs are merged."""
        return not weights

    def may_take(self, weights: Sequence[LoadedLora]) -> bool:
        """Always."""
        return False

    def sampler(self, request: ImageRequest, seeds: Sequence[int]) -> BlocksSampler:
        """Return a sampler."""
        shape = self.latent_shape(request.width, request.height)
        return BlocksSampler([torch.Generator().manual_seed(seed) for seed in seeds], shape, request.steps)

    def begin(self, request: ImageRequest) -> BlocksEncoding:
        """Read the prompt, after an empty one if it is to guide."""
        return BlocksEncoding(self, request, ["", request.prompt] if is_guided(request) else [request.prompt])

    def encode(self, pixels: torch.Tensor) -> EncodedImage:
        """Return the means of the blocks."""
        mean = nn.functional.avg_pool2d(pixels, BLOCK)
        return EncodedImage(mean=mean, deviation=torch.zeros_like(mean), centre=0.0, factor=1.0, dtype=mean.dtype)

    @torch.inference_mode()
    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Mix all rows at once."""
        layout = BatchLayout.of([call.conditioning for call in calls])
        rows = Rows.of(calls, layout)
        output = self._mixer(rows.sample, rows.timesteps, rows.text)
        return guided_outputs(output, layout, [call.request.guidance_scale for call in calls])

    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Paint the blocks."""
        colours = torch.sigmoid(latents.float())
        return colours.repeat_interleave(BLOCK, dim=2).repeat_interleave(BLOCK, dim=3)


@dataclass(eq=False)
class BlocksEncoding:
    """A prompt on its way, one text after the other."""

    denoiser: BlocksDenoiser
    request: ImageRequest
    texts: list[str]
    done: tuple[torch.Tensor, ...] = ()

    @property
    def calls_left(self) -> int:
        """One for each text."""
        return len(self.texts) - len(self.done)

    @torch.inference_mode()
    def advance(self) -> Conditioning | None:
        """Read the next text."""
        ids = torch.tensor([[*self.texts[len(self.done)].encode().ljust(length_of(self.request), b"\0")]])
        self.done += (self.denoiser.text(ids),)
        return None if self.calls_left else Conditioning(text=torch.cat(self.done), added={}, n=self.request.n)


@dataclass(eq=False)
class BlocksSampler:
    """Walks from noise to colours in equal steps."""

    generators: list[torch.Generator]
    shape: tuple[int, int, int]
    steps: int

    @property
    def timesteps(self) -> torch.Tensor:
        """1 to almost 0."""
        return torch.linspace(1.0, 1.0 / self.steps, self.steps)

    def draw(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draw noise."""
        return torch.stack([torch.randn(self.shape, generator=each) for each in self.generators]).to(dtype)

    def init_latents(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return the noise."""
        return self.draw() if noise is None else noise

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Mix both."""
        time = self.timesteps[step]
        return (1 - time) * latents + time * noise

    def scale_input(self, latents: torch.Tensor, step: int) -> torch.Tensor:
        """Return them."""
        return latents

    def step(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Go one step."""
        return latents + output / self.steps

    def predicted_original(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Go all steps at once."""
        return latents + output * self.timesteps[step]


def is_guided(request: ImageRequest) -> bool:
    """Return whether two rows make an image."""
    return request.guidance_scale > 1.0


def length_of(request: ImageRequest) -> int:
    """Return to what its text is filled up."""
    return request.max_sequence_length or LENGTH


PIPELINE = "BlocksPipeline"
ROW = FamilyRow(load=lambda: BlocksFamily, denoiser=MIXER, kind=lambda _: BlocksFamily.kind)
"""Its line in the table: `FAMILIES[PIPELINE] = ROW`."""


def blocks_folder(folder: Path, *, seed: int = 0) -> Path:
    """Write a model with random weights."""
    with seeded(seed):
        for part, kind in KINDS.items():
            kind().save_pretrained(folder / part)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINE}))
    return folder


def blocks_lora(path: Path, *, seed: int = 1) -> Path:
    """Write a LoRA of the layers that mix, and of the text's, by PEFT's rules."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for component, layer in ((MIXER, "inner"), (TEXT, "out")):
        rows, columns = KINDS[component]().get_submodule(layer).weight.shape
        tensors[f"{component}.{layer}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
        tensors[f"{component}.{layer}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(tensors, path)
    return path
