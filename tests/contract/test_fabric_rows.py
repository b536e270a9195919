"""Rows of other processes' tables: several shards at once, copies, versions, shards that are lost, and bad peers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_disagg.tables.errors import MixedVersions, ShardLost, ShardRefused
from plait_disagg.tables.fused import FusedTables
from plait_disagg.tables.protocols import LookupRequest, Tables
from plait_disagg.tables.reference import SeparateTables
from plait_disagg.tables.storage import pack_tables
from plait_disagg.workers.shard import ShardWorker
from plait_fabric import PeerLost, connect
from plait_fabric.testing.channel import eventually
from support.fabric_rows import SECRET, merged, pieces_of, reach, records, shard
from support.tables import make_ask, make_weights

WEIGHTS = make_weights()
ASKS = [make_ask("t0", "sum", [[1, 2], [], [6]], weighted=True), make_ask("t3", "rows", [[5, 60]])]
WAIT_S = 60.0


def _worker(**options: Any) -> ShardWorker:
    return shard(FusedTables(pack_tables(WEIGHTS)), records(WEIGHTS), **options)


class _Gated:
    """Tables that answer when they may."""

    def __init__(self, inner: Tables) -> None:
        self._inner = inner
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def lookup(self, asks: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """As the inner tables, after the gate."""
        self.asked.set()
        assert self.may_answer.wait(WAIT_S)
        return self._inner.lookup(asks)


def test_shards_work_at_the_same_time() -> None:
    """Both shards have their question before either has answered."""
    held = [pieces_of(number) for number in range(2)]
    gates = [_Gated(tables) for tables, _ in held]
    workers = [shard(gate, names) for gate, (_, names) in zip(gates, held, strict=True)]
    sharded = merged([reach(worker) for worker in workers])
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(sharded.lookup, ASKS)
        assert all(gate.asked.wait(WAIT_S) for gate in gates)
        for gate in gates:
            gate.may_answer.set()
        for value, twin in zip(found.result(WAIT_S), SeparateTables(WEIGHTS).lookup(ASKS), strict=True):
            assert torch.allclose(value, twin, rtol=1e-5, atol=1e-6)
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_one_copy_on_the_sending_side(scheme: str, tmp_path: Path) -> None:
    """A lookup copies each number once: into memory of the channel, which is then sent as it is; so does its answer."""
    address = {"inproc": "", "shm": f"shm://{tmp_path}/s", "tcp": "tcp://127.0.0.1:0"}[scheme]
    worker = _worker(address=address)
    tables = reach(worker)
    bags = make_ask("t3", "sum", [list(range(60))] * 300, weighted=True)
    assert bags.offsets is not None
    assert bags.weights is not None
    (value,) = tables.lookup([bags])
    channel = tables._channel
    assert channel is not None
    sent = channel.statistics()
    numbers = bags.ids.nbytes + bags.offsets.nbytes + bags.weights.nbytes
    assert (sent.copies, sent.copied_bytes, sent.bytes_sent) == (3, numbers, numbers)
    (answering,) = worker._channels
    assert eventually(lambda: answering.statistics().bytes_sent > 0), "it counts after it has sent"
    answered = answering.statistics()
    assert (answered.copies, answered.copied_bytes, answered.bytes_sent) == (1, value.nbytes, value.nbytes)
    tables.close()
    worker.stop()


def test_answers_carry_the_version() -> None:
    """An answer says which version of the rows it is of; a replacement shows from the next lookup on."""
    worker = _worker(version=3)
    tables = reach(worker)
    assert tables.begin(ASKS).result().version == 3
    newer = {name: weight + 1 for name, weight in WEIGHTS.items()}
    worker.replace(FusedTables(pack_tables(newer)), version=4)
    found = tables.begin(ASKS).result()
    assert (found.version, tables.version) == (4, 4)
    assert torch.equal(found.values[1], SeparateTables(newer).lookup(ASKS)[1])
    worker.stop()


def test_shards_of_two_versions_are_not_mixed() -> None:
    """While shards answer from different versions nothing is merged; once they agree, lookups work again."""
    held = [pieces_of(number) for number in range(2)]
    workers = [shard(*pieces) for pieces in held]
    sharded = merged([reach(worker) for worker in workers])
    workers[0].replace(held[0][0], version=1)
    with pytest.raises(MixedVersions, match=r"1, .* 0"):
        sharded.lookup(ASKS)
    workers[1].replace(held[1][0], version=1)
    assert len(sharded.lookup(ASKS)) == 2
    for worker in workers:
        worker.stop()


def test_a_lost_shard_is_an_error_and_comes_back() -> None:
    """A shard that is gone is named; when it listens again the next lookup finds it."""
    worker = _worker()
    address = worker.addresses[0]
    tables = reach(worker)
    tables.lookup(ASKS)
    worker.stop()
    for _ in range(2):
        with pytest.raises(ShardLost, match=address):
            tables.lookup(ASKS)
    worker = _worker(address=address)
    assert len(tables.lookup(ASKS)) == 2
    worker.stop()


def test_a_shard_that_does_not_answer_in_time_is_lost() -> None:
    """A silent shard is an error after the time-out; its late answer is nobody's."""
    gate = _Gated(FusedTables(pack_tables(WEIGHTS)))
    worker = shard(gate, records(WEIGHTS))
    tables = reach(worker, answer_timeout_s=0.1)
    with pytest.raises(ShardLost, match=r"no answer within 0\.1 s"):
        tables.lookup(ASKS)
    gate.may_answer.set()
    tables = reach(worker)
    first = tables.begin(ASKS[:1])
    (value,) = tables.begin(ASKS[1:]).result().values
    assert torch.equal(value, SeparateTables(WEIGHTS).lookup(ASKS[1:])[0]), "the first answer was dropped"
    assert first is not None
    worker.stop()


def test_what_a_shard_has_not_is_refused() -> None:
    """A table that a shard does not serve is refused by name, and the channel goes on."""
    worker = _worker()
    tables = reach(worker)
    with pytest.raises(ShardRefused, match="nowhere"):
        tables.lookup([make_ask("nowhere", "sum", [[1]])])
    assert len(tables.lookup(ASKS)) == 2
    with pytest.raises(ValueError, match="pooling needs offsets"):
        tables.lookup([LookupRequest(lookup=ASKS[0].lookup, ids=ASKS[0].ids)])
    worker.stop()


_GOOD = {"kind": "rows", "wire": 1, "number": 1}


@pytest.mark.parametrize(
    ("header", "buffers"),
    [
        ({}, []),
        ({**_GOOD, "wire": 2, "asks": []}, [b"", b"", b""]),
        ({**_GOOD, "number": -1, "asks": []}, [b"", b"", b""]),
        ({**_GOOD, "asks": []}, [b""]),
        ({**_GOOD, "asks": []}, [bytes(8), b"", b""]),
        ({**_GOOD, "asks": []}, [bytes(7), b"", b""]),
        ({**_GOOD, "asks": [["t0", "rows", [2], -1, False]]}, [bytes(8), b"", b""]),
        ({**_GOOD, "asks": [["t0", "rows", [1 << 50], -1, False]]}, [bytes(8), b"", b""]),
        ({**_GOOD, "asks": [["t0", "sum", [1], 1, False]]}, [bytes(8), bytes(16), b""]),
        ({**_GOOD, "asks": [["t0", "sum", [1], -1, False]]}, [bytes(8), b"", b""]),
        ({**_GOOD, "asks": [["t0", "max", [0], 0, True]]}, [b"", bytes(8), b""]),
        ({**_GOOD, "asks": [["t0", "median", [0], 0, False]]}, [b"", bytes(8), b""]),
        ({**_GOOD, "asks": [[0]]}, [b"", b"", b""]),
    ],
    ids=range(13),
)
def test_bad_clients_are_cut_off(
    header: dict[str, Any], buffers: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that sends what no client sends is disconnected and logged; others are served."""
    worker = _worker()
    with connect(worker.addresses[0], secret=SECRET) as client, caplog.at_level(logging.WARNING):
        client.send(header, buffers)
        with pytest.raises(PeerLost):
            client.recv(WAIT_S)
    assert "dropping client" in caplog.text
    assert len(reach(worker).lookup(ASKS)) == 2
    worker.stop()
