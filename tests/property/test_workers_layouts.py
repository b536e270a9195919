"""Packed messages against what was packed, under random shapes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_fabric import Lease
from plait_fabric.layouts import pack, unpack
from plait_fabric.memory.pool import Pool
from support.layout_twin import describe, encode

TOLERANCE = {"float16": 2.0**-11, "int8": 0.5 / 255}
"""Of a number's size (float16: half a unit in the last place) or of its row's range (int8: half a step)."""


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 700]), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.sampled_from("uif"), st.sampled_from([(), (1,), (16,), (3, 16)]), st.sampled_from([0, 0, 1])),
        max_size=6,
    ),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]),
    st.sampled_from(["float32", "float16", "int8"]),
    st.integers(0, 1000),
)
def test_messages_are_packed_as_by_their_naive_twin_and_arrive(candidates, parts, backwards, last, wire, seed):
    """Byte for byte, whether neighbours in memory, out of order, apart, cut off or not contiguous; no lease is left
    behind. What arrives is what left, but for the wire format's error; rows too short for int8 stay float32."""
    users, items = len(candidates), sum(candidates)
    rows = {"u": users, "i": items, "f": users + items + 1}
    torch.manual_seed(seed)
    tensors, at = {"none": torch.zeros(0, 16)}, 0
    memory = torch.randn(6 * (users + items + 1) * 48 + 6)
    for n, (side, tail, gap) in enumerate(parts):
        shape = (rows[side], *tail)
        tensors[f"t{n}"] = memory[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape) + gap
    if backwards:
        tensors = dict(reversed(tensors.items()))
    tensors["last"] = torch.randn(items, 2).to(last)
    tensors["strided"] = torch.randn(2, items).T
    layout, counts = describe(tensors, users=users, items=items, wire=wire)
    pool = Pool.anonymous(1 << 24)
    buffers = pack(layout, counts, tensors, pool, timeout_s=1.0)
    made = [bytearray(it.memory if isinstance(it, Lease) else it) for it in buffers]
    for lease in (it for it in buffers if isinstance(it, Lease)):
        lease.release()
    assert made == encode(layout, tensors)
    assert pool.statistics().leases == 0
    views = [memoryview(it) for it in made]
    arrived = unpack(layout, counts, views)
    assert arrived.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (arrived[name].shape, arrived[name].dtype) == (value.shape, value.dtype)
        if value.dtype is torch.float32 and value.numel():
            packed = wire == "float16" or (wire == "int8" and value.dim() > 1 and value.shape[-1] >= 16)
            spread = value.abs().max() if wire == "float16" else (value.amax(-1) - value.amin(-1)).max()
            error = (arrived[name] - value).abs().max()
            assert error <= (float(spread) * TOLERANCE[wire] * 1.01 + 1e-6 if packed else 0.0)
        else:
            assert torch.equal(arrived[name], value)
