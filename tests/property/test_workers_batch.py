"""Batches against one-by-one, and packed messages against what was packed, under random shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ranking_model as kit
from plait_disagg.messages.layout import layout_of_inputs
from plait_disagg.messages.wire import parse_rank, rank_message
from plait_disagg.queue.batch import cut, join, user_of
from plait_disagg.queue.knobs import WireFormat
from plait_fabric import Lease
from plait_fabric.layouts import Layout, RowCounts, pack, parse_layout, unpack
from plait_fabric.memory.pool import Pool
from plait_fabric.transport.inproc import pair
from support.layout_twin import describe, encode

DTYPES = {"i8": torch.int64, "f8": torch.float64, "f4": torch.float32, "f2": torch.float16, "b1": torch.bool}


def decode(layout: Layout, counts: RowCounts, buffers: Sequence[memoryview]) -> dict[str, torch.Tensor]:
    """What `unpack` makes of buffers that are right."""
    rows = {"u": counts.users, "i": counts.items, "U": counts.users + 1, "I": counts.items + 1}
    given = dict(zip(layout.given, counts.flat, strict=True))
    tensors, parts = {}, {part.name: part for part in layout.parts}
    for section, buffer in zip(layout.sections, buffers, strict=True):
        rest = bytes(buffer)
        for part in (parts[name] for group in section.groups for name in group.names):
            shape = (given.get(part.name, rows.get(part.rows, 0)), *part.tail)
            width = 0 if part.code != "q1" else part.tail[-1]
            numbers = math.prod(shape) if not width else math.prod(shape) // width * (width + 8)
            dtype = torch.uint8 if width else DTYPES[part.code]
            nbytes = numbers * dtype.itemsize
            flat = torch.frombuffer(bytearray(rest[:nbytes]), dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
            if width and nbytes:
                flat = torch.ops.quantized.embedding_bag_byte_unpack(flat.view(-1, width + 8))
            tensors[part.name] = (flat.float() if part.code in ("f2", "q1") else flat).reshape(shape)
            rest = rest[nbytes:]
    return tensors


REQUESTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(REQUESTS)
def test_a_batch_is_its_requests_one_by_one(asked: list[tuple[int, int]]) -> None:
    """Joined, computed and cut apart, every request has the answer that it has alone."""
    requests = [kit.request(seed, candidates) for seed, candidates in asked]
    candidates = [request.candidates for request in requests]
    together = kit.FakeDense().run(kit.FakeSparse().run(requests), candidates)
    for request, mine in zip(requests, cut(together, candidates), strict=True):
        for name, value in kit.expected(request).items():
            torch.testing.assert_close(mine[name], value)


@settings(max_examples=60)
@given(REQUESTS)
def test_user_of_says_whose_each_candidate_is(asked: list[tuple[int, int]]) -> None:
    """As the definition says: candidate by candidate, request by request."""
    batch = join(kit.INPUTS, [kit.request(seed, candidates) for seed, candidates in asked])
    assert batch.user_of.tolist() == [r for r, (_, candidates) in enumerate(asked) for _ in range(candidates)]
    assert batch.user_of.dtype == user_of(batch.candidates).dtype == torch.int64


@settings(max_examples=60)
@given(st.integers(0, 1000), st.integers(1, 2000), st.integers(0, 20))
def test_a_request_arrives_as_it_left(seed: int, candidates: int, longest_bag: int) -> None:
    """Bit for bit, small ones and those that need a lease; no lease is left behind."""
    tensors = kit.tensors(seed, candidates, longest_bag=longest_bag)
    request = kit.request(seed, candidates, changes=tensors)
    layout = layout_of_inputs(kit.INPUTS)
    left, right = pair()
    left.send(*rank_message(5, request, layout, left.pool))
    with right.recv(60) as message:
        arrived = parse_rank(message.header, message.buffers, kit.CARD, layout)
        assert arrived.candidates == candidates
        assert set(arrived.tensors) == set(tensors)
        assert all(torch.equal(arrived.tensors[name], tensors[name]) for name in tensors)
    assert left.pool.statistics().leases == 0


TOLERANCE = {"float32": 0.0, "float16": 2.0**-11, "int8": 0.5 / 255}
"""Of a number's size (float16: half a unit in the last place) or of its row's range (int8: half a step)."""


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.sampled_from([1, 3, 15, 16, 64]),
    st.sampled_from(["float32", "float16", "int8"]),
    st.integers(0, 1000),
)
def test_crossing_tensors_arrive_within_the_wire_formats_error(
    candidates: list[int], dim: int, wire: WireFormat, seed: int
) -> None:
    """Also ids, flags, higher dimensions and empty tensors; rows that are too short for int8 stay float32."""
    chance = torch.Generator().manual_seed(seed)
    users, items = len(candidates), sum(candidates)
    tensors = {
        "user": torch.randn(users, dim, generator=chance),
        "item": torch.randn(items, dim, generator=chance) * 100,
        "deep": torch.randn(items, 2, dim, generator=chance),
        "flat": torch.randn(users + items, generator=chance),
        "none": torch.zeros(0, dim),
        "ids": torch.randint(-(1 << 62), 1 << 62, (items,), generator=chance),
        "mask": torch.rand(items, 3, generator=chance) > 0.5,
    }
    layout, counts = describe(tensors, users=users, items=items, wire=wire)
    assert parse_layout(layout.text) is layout
    left, right = pair()
    left.send({}, pack(layout, counts, tensors, left.pool, timeout_s=1.0))
    with right.recv(60) as message:
        arrived = {name: value.clone() for name, value in unpack(layout, counts, message.buffers).items()}
    for name, value in tensors.items():
        assert arrived[name].shape == value.shape
        assert arrived[name].dtype == value.dtype
        if not value.is_floating_point():
            assert torch.equal(arrived[name], value)
        elif value.numel():
            packed = wire != "int8" or (value.dim() > 1 and dim >= 16)
            spread = value.abs().max() if wire == "float16" else (value.amax(-1) - value.amin(-1)).max()
            error = (arrived[name] - value).abs().max()
            assert error <= (float(spread) * TOLERANCE[wire] * 1.01 + 1e-6 if packed and wire != "float32" else 0.0)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 700]), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(["u", "i", "f"]), st.sampled_from([(), (1,), (16,), (3, 16)])), max_size=6),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]),
    st.sampled_from(["float32", "float16", "int8"]),
    st.integers(0, 1000),
)
def test_plans_pack_and_unpack_as_their_naive_twin(
    candidates: list[int], parts: list[tuple[str, tuple[int, ...]]], last: torch.dtype, wire: WireFormat, seed: int
) -> None:
    """Byte for byte and tensor for tensor, whatever lies beside each other; no lease is left behind."""
    users, items = len(candidates), sum(candidates)
    rows = {"u": users, "i": items, "f": users + items + 1}
    torch.manual_seed(seed)
    tensors = {f"t{n}": torch.randn(rows[side], *tail) for n, (side, tail) in enumerate(parts)}
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
    naive, planned = decode(layout, counts, views), unpack(layout, counts, views)
    assert naive.keys() == planned.keys()
    for name, tensor in naive.items():
        assert tensor.shape == planned[name].shape
        assert torch.equal(tensor, planned[name])
