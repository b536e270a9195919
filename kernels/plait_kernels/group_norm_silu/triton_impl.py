"""GroupNorm + SiLU in two passes: partial statistics of pieces, then every program joins those it needs and normalises.

x is read twice, the second time mostly from the L2 cache; eager torch moves it five times (addition, norm, SiLU).
Channels-last memory is cut into pixels x channels, so that loads coalesce: for statistics at borders of groups, for
normalising in blocks of 64 channels, which leave no lane idle. Other memory is copied to be so: on a GPU every norm of
a UNet and of a ControlNet is given channels-last images.

A piece's sums are taken of the distance to one of its own values, K: `|K - mean| <= sqrt(n) * std`, so cancellation
costs at most n units in the last place of the variance, however far from zero the values lie.

In the kernels pixels x channels are fp32, and offsets are int32, which `_MAX_ELEMENTS` allows. `partial` holds means,
then sums of squared distances from them, of pieces. exp2 is one instruction on a GPU, where exp needs care for
subnormal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from plait_kernels.group_norm_silu import check_shapes, is_channels_last, reference

_TILE = 4096  # elements at a time: 32 per thread of 4 warps
_MAX_PIECES = 64  # of one image: every normalising program reads the statistics of all
_BLOCK = 64  # channels of one normalising program
_MAX_GRID = 65535  # a GPU's bound on the second dimension of a grid
_PROGRAMS = 512  # about four for every multiprocessor of a large GPU
_MAX_ELEMENTS = 2**30  # offsets are int32, with room for a last tile
_MAX_GROUP_CHANNELS = 1024  # a tile holds whole groups; a table of its groups x lanes stays in registers


def group_norm_silu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    addend: torch.Tensor | None = None,
    silu: bool = True,
) -> torch.Tensor:
    """Compute `silu(group_norm(x + addend))`; see `GroupNormSiluOp`. On a GPU, or a CPU under Triton's interpreter.
    What is larger than the kernels take is left to the reference."""
    check_shapes(x, groups, weight, bias, addend)
    if x.numel() > _MAX_ELEMENTS or x.shape[1] // groups > _MAX_GROUP_CHANNELS:
        return reference.group_norm_silu(x, groups, weight, bias, eps, addend=addend, silu=silu)
    last = is_channels_last(x)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.empty_like(x)  # keeps the strides
    if not y.numel():
        return y if last else y.contiguous()
    n, channels, height, width = x.shape
    pixels, per_group = height * width, channels // groups
    plan = plan_pixels(n, channels, pixels, groups)
    partial = torch.empty(2, n, plan.pieces, groups, dtype=torch.float32, device=x.device)
    t = x if addend is None else addend.contiguous()
    channel_statistics[triton.cdiv(groups, plan.whole), plan.pieces, n](
        x,
        t,
        partial,
        pixels,
        plan.piece,
        n * plan.pieces * groups,
        GROUPS=groups,
        PER_GROUP=per_group,
        WHOLE=plan.whole,
        SPAN=triton.next_power_of_2(plan.whole),
        WIDTH=plan.width,
        TILE=plan.tile,
        STEPS=plan.piece // plan.tile,
        ADD=addend is not None,
        EVEN=pixels % plan.piece == 0,
    )
    normalise_channels[triton.cdiv(channels, plan.block), triton.cdiv(pixels, plan.run), n](
        x,
        y,
        t,
        weight.contiguous(),
        bias.contiguous(),
        partial,
        pixels,
        plan.piece,
        plan.pieces,
        eps,
        n * plan.pieces * groups,
        GROUPS=groups,
        PER_GROUP=per_group,
        PIECES=triton.next_power_of_2(plan.pieces),
        SPAN=plan.span,
        BLOCK=plan.block,
        ROWS=plan.rows,
        STEPS=plan.run // plan.rows,
        ADD=addend is not None,
        SILU=silu,
        EVEN=pixels % plan.run == 0 and channels % plan.block == 0,
    )
    return y if last else y.contiguous()


def trial(device: str, dtype: torch.dtype) -> None:
    """Compile and run it once. Raises what Triton, its compiler or the device raise."""
    x = torch.zeros(1, 32, 4, 4, device=device, dtype=dtype)
    group_norm_silu(x, 4, torch.ones_like(x[0, :, 0, 0]), torch.zeros_like(x[0, :, 0, 0]), 1e-5).cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelPlan:
    """How channels-last `(N, pixels, C)` is cut. Statistics: `pieces` of `piece` pixels x `whole` groups, in tiles of
    `tile` pixels x `width` lanes. Normalising: `run` pixels x `block` channels, which touch at most `span` groups."""

    piece: int
    pieces: int
    whole: int
    width: int
    tile: int
    block: int
    span: int
    rows: int
    run: int


@lru_cache(maxsize=1024)
def plan_pixels(n: int, channels: int, pixels: int, groups: int) -> PixelPlan:
    """Return the cut for one shape. Pure."""
    per_group = channels // groups
    width = max(min(128, triton.next_power_of_2(channels)), triton.next_power_of_2(per_group))
    whole = min(width // per_group, groups)
    tile = max(1, min(_TILE // width, triton.next_power_of_2(pixels)))
    piece = _whole_tiles(triton.cdiv(pixels, _MAX_PIECES), tile)
    block = min(_BLOCK, triton.next_power_of_2(channels))
    rows = max(1, min(_TILE // block, triton.next_power_of_2(pixels)))
    run = rows
    while run < 4 * rows and n * triton.cdiv(channels, block) * triton.cdiv(pixels, 2 * run) >= _PROGRAMS:
        run *= 2
    while triton.cdiv(pixels, run) > _MAX_GRID:
        run *= 2
    return PixelPlan(
        piece=piece,
        pieces=triton.cdiv(pixels, piece),
        whole=whole,
        width=width,
        tile=tile,
        block=block,
        span=triton.next_power_of_2(min(groups, (block + per_group - 2) // per_group + 1)),
        rows=rows,
        run=run,
    )


def _whole_tiles(pixels: int, tile: int) -> int:
    """Return a piece's size: a power of two of tiles, because each number of them is a kernel to compile."""
    return int(triton.next_power_of_2(triton.cdiv(pixels, tile))) * tile


@triton.jit
def channel_statistics(
    x, t, partial, pixels, piece, partials,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, WHOLE: tl.constexpr, SPAN: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Channels-last: statistics of `piece` pixels of `WHOLE` groups. Grid: blocks of groups, pieces, images."""
    C: tl.constexpr = GROUPS * PER_GROUP
    n = tl.program_id(2)
    lane = tl.arange(0, WIDTH)
    channel = tl.program_id(0) * (WHOLE * PER_GROUP) + lane
    inside = (lane < WHOLE * PER_GROUP) & (channel < C)
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, pixels)
    image = x + n * pixels * C
    shift = tl.load(image + first * C + channel, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((TILE, WIDTH), tl.float32)
    squares = tl.zeros((TILE, WIDTH), tl.float32)
    for step in range(STEPS):
        pixel = first + step * TILE + tl.arange(0, TILE)
        at = image + pixel[:, None] * C + channel[None, :]
        if EVEN:
            d = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32) - shift[None, :]
        else:
            here = (pixel < last)[:, None] & inside[None, :]
            d = tl.where(here, tl.load(at, mask=here, other=0.0).to(tl.float32) - shift[None, :], 0.0)
        sums += d
        squares += d * d
    count = (last - first).to(tl.float32)
    total = tl.sum(sums, axis=0)
    mean = shift + total / count
    if ADD:
        mean += tl.load(t + n * C + channel, mask=inside, other=0.0).to(tl.float32)
    spread = tl.maximum(tl.sum(squares, axis=0) - total * total / count, 0.0)
    # Channels join to groups: rows of a table of groups x lanes.
    slot = tl.arange(0, SPAN)
    member = (lane[None, :] // PER_GROUP == slot[:, None]) & inside[None, :]
    mean_g = tl.sum(tl.where(member, mean[None, :], 0.0), axis=1) / PER_GROUP
    away = mean[None, :] - mean_g[:, None]
    spread_g = tl.sum(tl.where(member, spread[None, :] + count * away * away, 0.0), axis=1)
    group = tl.program_id(0) * WHOLE + slot
    to = partial + (n * tl.num_programs(1) + tl.program_id(1)) * GROUPS + group
    real = (slot < WHOLE) & (group < GROUPS)
    tl.store(to, mean_g, mask=real)
    tl.store(to + partials, spread_g, mask=real)


@triton.jit
def normalise_channels(
    x, y, t, weight, bias, partial, pixels, piece, pieces, eps, partials,
    GROUPS: tl.constexpr, PER_GROUP: tl.constexpr, PIECES: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    ADD: tl.constexpr, SILU: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Channels-last: joins the statistics of a block's groups, then normalises `STEPS` tiles of the block.

    Grid: blocks of channels, runs of pixels, images; the last pixels first, because the cache still holds those.
    """
    C: tl.constexpr = GROUPS * PER_GROUP
    n = tl.num_programs(2) - 1 - tl.program_id(2)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    group = tl.program_id(0) * BLOCK // PER_GROUP + tl.arange(0, SPAN)
    i = tl.arange(0, PIECES)
    known = (i < pieces)[:, None] & (group < GROUPS)[None, :]
    at = partial + (n * pieces + i[:, None]) * GROUPS + group[None, :]
    means = tl.load(at, mask=known, other=0.0)
    spreads = tl.load(at + partials, mask=known, other=0.0)
    counts = tl.maximum(tl.minimum(piece, pixels - i * piece), 0).to(tl.float32)[:, None] * PER_GROUP
    count = tl.sum(counts, axis=0)
    mean_g = tl.sum(means * counts, axis=0) / count
    away = means - mean_g[None, :]
    rstd_g = tl.rsqrt(tl.sum(spreads + counts * away * away, axis=0) / count + eps)
    member = channel[:, None] // PER_GROUP == group[None, :]
    mean = tl.sum(tl.where(member, mean_g[None, :], 0.0), axis=1)
    scale = tl.sum(tl.where(member, rstd_g[None, :], 0.0), axis=1)
    scale *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    offset = -mean  # added before the scale: what equals the mean gives the bias exactly
    if ADD:
        offset += tl.load(t + n * C + channel, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * (ROWS * STEPS)
    image = n * pixels * C
    for step in range(STEPS):
        pixel = first + step * ROWS + tl.arange(0, ROWS)
        to = image + pixel[:, None] * C + channel[None, :]
        if EVEN:
            v = (tl.load(x + to).to(tl.float32) + offset[None, :]) * scale[None, :] + b[None, :]
            if SILU:
                v = v / (1.0 + tl.exp2(v * -1.4426950408889634))
            tl.store(y + to, v.to(y.dtype.element_ty))
        else:
            here = (pixel < pixels)[:, None] & inside[None, :]
            v = (tl.load(x + to, mask=here, other=0.0).to(tl.float32) + offset[None, :]) * scale[None, :] + b[None, :]
            if SILU:
                v = v / (1.0 + tl.exp2(v * -1.4426950408889634))
            tl.store(y + to, v.to(y.dtype.element_ty), mask=here)
