"""Stacks the rows of several requests for one model call and splits them again.

A call of K requests has rows `[uncond of those requests that have CFG; cond of request 0, 1, ..., K-1]`, each request's
n images together: R rows in all, of N images. A block is one branch of one request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch

from plait_kernels.lora_merge import is_finite
from plait_serving.diffusion.errors import EngineError, NumericalError
from plait_serving.diffusion.protocols import Conditioning, StepCall

_T = TypeVar("_T")
_A = TypeVar("_A")


@dataclass(frozen=True, slots=True, eq=False)
class BatchLayout:
    """How many images each request has, and whether it has 1 or 2 `branches`. `blocks`: each block's request and
    branch, in the order of the rows."""

    counts: tuple[int, ...]
    branches: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, conditionings: Sequence[Conditioning]) -> BatchLayout:
        """Return the layout of the requests in order."""
        branches = tuple(conditioning.branches for conditioning in conditionings)
        blocks = [(k, 0) for k, of_k in enumerate(branches) if of_k == 2]
        blocks += [(k, of_k - 1) for k, of_k in enumerate(branches)]
        return cls(tuple(conditioning.n for conditioning in conditionings), branches, tuple(blocks))

    @property
    def size(self) -> int:
        """R: all rows."""
        return sum(self.counts[k] for k, _ in self.blocks)

    def rows(self, k: int) -> list[slice]:
        """Return request k's rows, one slice per branch."""
        starts = accumulate((self.counts[owner] for owner, _ in self.blocks), initial=0)
        return [
            slice(start, start + self.counts[k])
            for start, (owner, _) in zip(starts, self.blocks, strict=False)
            if owner == k
        ]


def stack_conditionings(values: Sequence[torch.Tensor], layout: BatchLayout) -> torch.Tensor:
    """Stack the requests' `(branches, ...)` to `(R, ...)`, every branch row once per image."""
    pieces = [
        values[k][branch : branch + 1].expand(layout.counts[k], *values[k].shape[1:]) for k, branch in layout.blocks
    ]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def with_extra(sample: torch.Tensor, calls: Sequence[StepCall], layout: BatchLayout) -> torch.Tensor:
    """Return what the UNet reads, `(R, c + e, h, w)`: the stacked samples with the calls' extra channels, if there are
    any."""
    extras = [extra for k, _ in layout.blocks if (extra := calls[k].extra) is not None]
    return torch.cat([sample, torch.cat(extras)], dim=1) if extras else sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """What a model reads in one call: `sample (R, c, h, w)`, `timesteps (R,)`, `text (R, L, C)`, and by name what
    else the conditionings hold, `(R, ...)`. `scales`: each row's `guidance_scale`."""

    sample: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    added: Mapping[str, torch.Tensor]
    scales: Sequence[float]

    @classmethod
    def of(cls, calls: Sequence[StepCall], layout: BatchLayout) -> Rows:
        """Stack the calls of a batch."""
        given = [call.conditioning for call in calls]
        samples = [calls[k].sample for k, _ in layout.blocks]
        steps = [calls[k].timestep.reshape(1).expand(layout.counts[k]) for k, _ in layout.blocks]
        if len({step.dtype for step in steps}) > 1:  # schedulers differ in it
            steps = [step.to(torch.float32) for step in steps]
        return cls(
            sample=samples[0] if len(samples) == 1 else torch.cat(samples),
            timesteps=torch.cat(steps),
            text=stack_conditionings([each.text for each in given], layout),
            added={name: stack_conditionings([each.added[name] for each in given], layout) for name in given[0].added},
            scales=[calls[k].request.guidance_scale for k, _ in layout.blocks for _ in range(layout.counts[k])],
        )


def own_rows(stacked: torch.Tensor, layout: BatchLayout, k: int) -> torch.Tensor:
    """Return request k's rows of `stacked (R, ...)`, unconditional ones first."""
    parts = [stacked[rows] for rows in layout.rows(k)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def guide(output: torch.Tensor, layout: BatchLayout, k: int, *, scale: float, rescale: float = 0.0) -> torch.Tensor:
    """Return request k's guided model output `(n, ...)` from the model's `output (R, ...)`: without CFG as it is."""
    parts = [output[rows] for rows in layout.rows(k)]
    if len(parts) == 1:
        return parts[0]
    unconditional, conditional = parts
    guided = unconditional + scale * (conditional - unconditional)
    return rescaled(guided, conditional, rescale) if rescale else guided


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


def in_groups(items: Sequence[_T], key: Callable[[_T], Hashable], run: Callable[[list[_T]], list[_A]]) -> list[_A]:
    """Return what `run` returns for the items, which it is given in groups of one key, each in order."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        groups[key(item)].append(i)
    found: dict[int, _A] = {}
    for indices in groups.values():
        found |= zip(indices, run([items[i] for i in indices]), strict=True)
    return [found[i] for i in range(len(items))]


def guided_outputs(
    output: torch.Tensor,
    layout: BatchLayout,
    scales: Sequence[float],
    *,
    rescales: Sequence[float] = (),
    errors: Sequence[EngineError | None] = (),
) -> list[torch.Tensor | EngineError]:
    """Return guided outputs per request; a request with an error or a non-finite row gets its error instead."""
    # Nearly always all are; looking at that first takes a third of the time (`plait bench kernels`, guided-update).
    finite = [True] * len(output) if is_finite(output) else output.isfinite().flatten(1).all(dim=1).tolist()
    results: list[torch.Tensor | EngineError] = []
    for k, scale in enumerate(scales):
        error = errors[k] if errors else None
        if error is not None:
            results.append(error)
        elif not all(all(finite[rows]) for rows in layout.rows(k)):
            results.append(NumericalError("the model's output is NaN or infinite"))
        else:
            results.append(guide(output, layout, k, scale=scale, rescale=rescales[k] if rescales else 0.0))
    return results
