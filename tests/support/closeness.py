"""How near float32 latents are to diffusers': in units of the last place, which hold on every processor.

A processor's kernels and thread counts choose the order of sums, so no two compute the same bits. Against diffusers in
float64 (starter models, 6 steps, a ControlNet and a LoRA), diffusers in float32 is 6 to 14 ulps off, with AVX-512 and
with AVX2, with one thread and with two; ours is as far, in some other direction.
"""

from __future__ import annotations

import torch

EQUAL, IN_COMPANY = 100.0, 1000.0
"""The largest difference, in ulps: of what computes the same by other kernels, about 5e-5 of latents around 4; and of
an image that shares calls with others, where every layer sums in another order and latents on the way are larger than
those at the end (240 were seen where these are clipped to 1)."""


def ulps(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in float32's units of the last place of the largest of `theirs`, or of 1, about what
    layers hold on the way, if that is larger; infinite where a number is not finite. Shapes have to be the same."""
    assert ours.shape == theirs.shape
    unit = torch.finfo(torch.float32).eps * max(1.0, float(theirs.abs().max()))
    found = float((ours.double() - theirs.double()).abs().max()) / unit
    return found if found < float("inf") else float("inf")
