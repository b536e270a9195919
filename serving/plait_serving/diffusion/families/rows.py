"""Stacks the rows of several requests for one model call and splits them again.

A call of K requests with CFG has rows `[uncond of request 0, 1, ..., K-1; cond of request 0, 1, ..., K-1]`, each
request's n images together; without CFG only the second part. R rows in all, R/2 = N or R = N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from plait_serving.diffusion.protocols import Conditioning, StepCall


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """Where each request's images are: `starts[k] .. starts[k] + counts[k]` of N, in each of `branches` parts."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    images: int
    branches: int

    @classmethod
    def of(cls, conditionings: Sequence[Conditioning]) -> BatchLayout:
        """Return the layout of the requests in order."""
        counts = tuple(conditioning.n for conditioning in conditionings)
        starts = tuple(sum(counts[:k]) for k in range(len(counts)))
        return cls(starts, counts, sum(counts), 2 if conditionings[0].uses_cfg else 1)

    def rows(self, k: int) -> list[slice]:
        """Return request k's rows, one slice per branch."""
        return [slice(b * self.images + self.starts[k], b * self.images + self.starts[k] + self.counts[k])
                for b in range(self.branches)]  # fmt: skip


def stack_conditionings(values: Sequence[torch.Tensor], layout: BatchLayout) -> torch.Tensor:
    """Stack the requests' `(branches, ...)` to `(R, ...)`, every branch row once per image."""
    pieces = [
        value[branch : branch + 1].expand(count, *value.shape[1:])
        for branch in range(layout.branches)
        for value, count in zip(values, layout.counts, strict=True)
    ]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def stack_samples(calls: Sequence[StepCall], layout: BatchLayout) -> torch.Tensor:
    """Return `(R, c, h, w)`: all images' samples, once per branch."""
    samples = [call.sample for call in calls] * layout.branches
    return samples[0] if len(samples) == 1 else torch.cat(samples)


def with_extra(sample: torch.Tensor, calls: Sequence[StepCall], layout: BatchLayout) -> torch.Tensor:
    """Return what the UNet reads, `(R, c + e, h, w)`: the stacked samples with the calls' extra channels, if there are
    any."""
    extras = [call.extra for call in calls if call.extra is not None] * layout.branches
    return torch.cat([sample, torch.cat(extras)], dim=1) if extras else sample


def stack_timesteps(calls: Sequence[StepCall], layout: BatchLayout) -> torch.Tensor:
    """Return `(R,)`, each request's timestep on its rows; schedulers differ in dtype, so a mix is float32."""
    steps = [call.timestep.reshape(1).expand(count) for call, count in zip(calls, layout.counts, strict=True)]
    if len({step.dtype for step in steps}) > 1:
        steps = [step.to(torch.float32) for step in steps]
    return torch.cat(steps * layout.branches)


def own_rows(stacked: torch.Tensor, layout: BatchLayout, k: int) -> torch.Tensor:
    """Return request k's rows of `stacked (R, ...)`, unconditional ones first."""
    parts = [stacked[rows] for rows in layout.rows(k)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def guide(output: torch.Tensor, layout: BatchLayout, k: int, call: StepCall) -> torch.Tensor:
    """Return request k's guided model output `(n, c, h, w)` from the model's `output (R, c, h, w)`."""
    parts = [output[rows] for rows in layout.rows(k)]
    if len(parts) == 1:
        return parts[0]
    unconditional, conditional = parts
    guided = unconditional + call.guidance_scale * (conditional - unconditional)
    return rescaled(guided, conditional, call.guidance_rescale) if call.guidance_rescale else guided


def rescaled(guided: torch.Tensor, conditional: torch.Tensor, share: float) -> torch.Tensor:
    """Return `guided (n, c, h, w)` with a `share` of it brought to the deviation of `conditional`, image by image.

    Section 3.4 of "Common Diffusion Noise Schedules and Sample Steps are Flawed" (arXiv 2305.08891), in the order of
    diffusers' `rescale_noise_cfg`.
    """
    dims = list(range(1, guided.ndim))
    back = guided * (conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True))
    return share * back + (1 - share) * guided


def guidance_embedding(scales: Sequence[float], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Embed R guidance scales as `(R, width)`, like `StableDiffusionPipeline.get_guidance_scale_embedding` of w - 1.

    Source: Meng et al., On Distillation of Guided Diffusion Models (arXiv 2210.03142).
    """
    half = width // 2
    steps = torch.log(torch.tensor(10000.0, device=device)) / (half - 1)
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -steps)
    strengths = torch.tensor([scale - 1 for scale in scales], dtype=torch.float32, device=device) * 1000.0
    angles = strengths[:, None] * frequencies[None, :]
    embedded = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    return torch.nn.functional.pad(embedded, (0, width - 2 * half)).to(dtype)
