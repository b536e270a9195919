"""ControlNet services in threads, and the naive twin of their answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel
from PIL import Image

from plait_fabric import listen
from plait_kernels.executors.torch_program import TorchProgram
from plait_serving.diffusion.controlnet.service import ControlNetService, ServiceLimits
from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.unet.controlnet import ControlNetModelRunner
from plait_serving.diffusion.protocols import (
    Conditioning,
    ControlCall,
    ControlNetClient,
    ControlSession,
    Residuals,
)
from plait_serving.diffusion.values import RgbImage
from support import closeness

SIZE = 32
LATENT = 16
SECRET = secrets.token_bytes(32)
LOOSE = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class ControlCase:
    """A call and everything that a twin needs to answer it on its own."""

    image: RgbImage
    conditioning: Conditioning
    sample: torch.Tensor
    timestep: torch.Tensor
    scale: float

    def open(self, client: ControlNetClient) -> ControlSession:
        """A session with this ask's constants."""
        return client.open(image=self.image, conditioning=self.conditioning, width=SIZE, height=SIZE)

    def call(self, session: ControlSession) -> ControlCall:
        """The question, in that session."""
        return ControlCall(session=session, sample=self.sample, timestep=self.timestep, scale=self.scale)


def make_ask(
    seed: int, *, width: int = 32, n: int = 1, cfg: bool = True, scale: float = 1.0, step: float = 500, added: int = 0
) -> ControlCase:
    """A random ask. ``width`` is the text's, here SD 1.x's; ``added`` the width of SDXL's pooled text, 0 for none."""
    generator = torch.Generator().manual_seed(seed)
    branches = 2 if cfg else 1
    extra = {}
    if added:
        ids = torch.tensor([[SIZE, SIZE, 0, 0, SIZE, SIZE]], dtype=torch.float32).repeat(branches, 1)
        extra = {"text_embeds": torch.randn(branches, added, generator=generator), "time_ids": ids}
    return ControlCase(
        image=np.random.default_rng(seed).integers(0, 256, (40, 28, 3), dtype=np.uint8),
        conditioning=Conditioning(text=torch.randn(branches, 77, width, generator=generator), added=extra, n=n),
        sample=torch.randn(branches * n, 4, LATENT, LATENT, generator=generator),
        timestep=torch.tensor(step),
        scale=scale,
    )


class _OneByOne(torch.nn.Module):
    """Embeds a batch of images one by one: convolutions round an image alone and in a batch differently."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(image) for image in images.split(1)])


def load_twin(folder: Path) -> ControlNetModel:
    """diffusers' own model, freshly loaded; one image at a time is embedded, which pins how that rounds."""
    model = ControlNetModel.from_pretrained(folder, local_files_only=True).eval()
    model.controlnet_cond_embedding = _OneByOne(model.controlnet_cond_embedding)
    return model


@torch.no_grad()
def twin_answers(model: ControlNetModel, asks: Sequence[ControlCase]) -> list[Residuals]:
    """The same batch through `ControlNetModel.forward`, images and all, then each call's part times its scale."""
    sizes = [ask.sample.shape[0] for ask in asks]

    def rows(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [value.repeat_interleave(ask.conditioning.n, 0) for value, ask in zip(values, asks, strict=True)]
        )

    images = [_image(ask.image).expand(size, -1, -1, -1) for ask, size in zip(asks, sizes, strict=True)]
    added = {name: rows([ask.conditioning.added[name] for ask in asks]) for name in asks[0].conditioning.added}
    down, mid = model(
        sample=torch.cat([ask.sample for ask in asks]),
        timestep=torch.cat([ask.timestep.reshape(1).expand(size) for ask, size in zip(asks, sizes, strict=True)]),
        encoder_hidden_states=rows([ask.conditioning.text for ask in asks]),
        controlnet_cond=torch.cat(images),
        added_cond_kwargs=added,
        return_dict=False,
    )
    parts = [tensor.split(sizes) for tensor in (*down, mid)]
    return [
        Residuals(down=tuple(part[i] * ask.scale for part in parts[:-1]), mid=parts[-1][i] * ask.scale)
        for i, ask in enumerate(asks)
    ]


def _image(image: RgbImage) -> torch.Tensor:
    """What `StableDiffusionControlNetPipeline.prepare_image` makes of an image, written out."""
    resized = Image.fromarray(image).resize((SIZE, SIZE), resample=Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(resized).astype(np.float32) / 255.0).permute(2, 0, 1)[None].contiguous()


def same_bits(answer: Residuals | EngineError, expected: Residuals) -> bool:
    """Whether an answer is residuals, and exactly those."""
    if isinstance(answer, EngineError):
        raise answer
    pairs = zip((*answer.down, answer.mid), (*expected.down, expected.mid), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def ulps(answer: Residuals | EngineError, expected: Residuals) -> float:
    """The largest difference over all tensors, in ulps of the largest number of all (`support.closeness`)."""
    if isinstance(answer, EngineError):
        raise answer
    ours, theirs = (torch.cat([each.flatten() for each in (*it.down, it.mid)]) for it in (answer, expected))
    return closeness.ulps(ours, theirs)


class LooseProgram(TorchProgram):
    """A prepared program whose answers show that it ran: torch's, and `LOOSE` more."""

    def __init__(self, runner: ControlNetModelRunner) -> None:
        super().__init__(runner.computation())
        self.runs = 0

    def run(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        """See PreparedProgram."""
        self.runs += 1
        return tuple(output + LOOSE for output in super().run(*arguments, **options))


@contextmanager
def serving(
    runner: ControlNetModelRunner,
    address: str,
    *,
    name: str = "edges",
    limits: ServiceLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[ControlNetService]:
    """A service in threads of this process."""
    service = ControlNetService(name, runner, [listen(address, secret=SECRET)], limits=limits, clock=clock)
    try:
        yield service
    finally:
        service.stop(drain_s=5)
