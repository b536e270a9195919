"""Both ends of a caching channel: whatever is asked, the HN has the rows that would have crossed without the cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_disagg.messages.hot_rows import RowReceiver, RowSavings, RowSender
from plait_disagg.messages.layout import layout_of_crossing
from plait_disagg.messages.wire import DenseAsk, dense_message, parse_dense
from plait_disagg.package.read import Package
from plait_disagg.queue.knobs import WorkerKnobs
from plait_fabric.memory.pool import Lease, Pool
from support import rank_rows as kit

POOL = Pool.anonymous(1 << 24)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The model `Match`; no test changes it."""
    return kit.packaged(tmp_path_factory.mktemp("rows") / "match")


def _crossed(layout, tensors, candidates, wire, hot=None) -> tuple[DenseAsk, int]:
    """What arrives, and its bytes."""
    header, buffers = dense_message(1, layout, tensors, candidates, POOL, wire=wire, hot=hot)
    views = []
    for buffer in buffers:
        views.append(memoryview(bytearray(buffer.memory if isinstance(buffer, Lease) else buffer)))
        if isinstance(buffer, Lease):
            buffer.release()
    return parse_dense(header, views, layout), sum(view.nbytes for view in views)


@settings(max_examples=25)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 7, 64])), min_size=1, max_size=3), max_size=6
    ),
    cache_rows=st.sampled_from([1, 3, 20, 1000]),
    policy=st.sampled_from(["lru", "static"]),
    wire=st.sampled_from(["float32", "float16", "int8"]),
)
def test_what_arrives_is_the_same_with_the_cache(package, batches, cache_rows, policy, wire):
    """Bit for bit, in every wire format, with caches smaller than a request; and the bytes saved are those counted."""
    sparse = package.sparse()
    layout = layout_of_crossing(package.dense().crossing, package.card().inputs)
    savings = RowSavings()
    sender = RowSender(sparse, WorkerKnobs(cache_rows=cache_rows, cache=policy, wire=wire), savings)
    receiver = RowReceiver()
    saved_bytes = 0
    for batch in batches:
        requests = [kit.request(package, seed, candidates) for seed, candidates in batch]
        candidates = [request.candidates for request in requests]
        plain, plain_bytes = _crossed(layout, sparse.run(requests), candidates, wire)
        tensors, hot = sender.encode(sparse.run_ids(requests))
        ask, nbytes = _crossed(layout, tensors, candidates, wire, hot)
        assert ask.hot is not None
        found = receiver.decode(ask.crossing, ask.hot)
        assert found.keys() == plain.crossing.keys()
        assert all(torch.equal(found[name], rows) for name, rows in plain.crossing.items())
        assert ask.mergeable == plain.mergeable
        saved_bytes += plain_bytes - nbytes
    assert savings.nbytes == saved_bytes
