"""The two kernels of `triton_impl`. `partial` holds means, then sums of squared distances from them, of pieces.

Pixels x channels are fp32 inside; offsets are int32, which the registry's bound on elements allows.
exp2 is one instruction on a GPU, where exp needs care for subnormal results.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
