"""Rows of other processes' tables: several shards at once, copies, versions, shards that are lost, and bad peers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_disagg.refresh.prepared_update import PreparedUpdate, RowWrite
from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.protocols import LookupRequest, OtherVersion, ShardLost, ShardRefused
from plait_disagg.tables.reference import SeparateTables
from plait_disagg.tables.remote import RemoteShard
from plait_disagg.tables.rows_wire import WIRE_VERSION
from plait_disagg.workers.shard import ShardWorker
from plait_fabric import PeerLost, connect, listen
from plait_fabric.rpc.fields import greeting
from support.fabric import CutListener, Replicas
from support.fabric_rows import SECRET, merged, reach, shard, two_pieces, who
from support.tables import held_by, make_ask, make_weights, stored
from support.waiting import wait_for

WEIGHTS = make_weights()
ASKS = [make_ask("t0", "sum", [[1, 2], [], [6]], weighted=True), make_ask("t3", "rows", [[5, 60]])]
WAIT_S = 60.0


def equal(values: Sequence[torch.Tensor], weights: Any = WEIGHTS, asks: Sequence[LookupRequest] = ASKS) -> bool:
    """Whether these are the bits of the naive twin."""
    twins = SeparateTables(weights).lookup(asks)
    return all(torch.equal(value, twin) for value, twin in zip(values, twins, strict=True))


@pytest.fixture
def serve() -> Iterator[Callable[..., ShardWorker]]:
    """`shard`, ended with the test."""
    with ExitStack() as ends:

        def started(number: int, **options: Any) -> ShardWorker:
            worker = shard(number, **options)
            ends.callback(worker.stop, drain_s=0)
            return worker

        yield started


class _Gated(HeldPieces):
    """Pieces that answer when they may."""

    def __init__(self, number: int) -> None:
        super().__init__(stored(WEIGHTS), two_pieces().of_shard(number))
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """As the others, after the gate."""
        self.asked.set()
        assert self.may_answer.wait(WAIT_S)
        return super().lookup(requests)


def test_shards_work_at_the_same_time(serve) -> None:
    """Both shards have their question before either has answered."""
    gates = [_Gated(number) for number in range(2)]
    workers = [serve(number, held=gate) for number, gate in enumerate(gates)]
    sharded = merged([reach(number, worker) for number, worker in enumerate(workers)])
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(sharded.lookup, ASKS)
        assert all(gate.asked.wait(WAIT_S) for gate in gates)
        for gate in gates:
            gate.may_answer.set()
        assert equal(found.result(WAIT_S))


def test_one_copy_on_the_sending_side(serve, tmp_path: Path) -> None:
    """A lookup copies each number once: into memory of the channel, which is then sent as it is; so does its answer."""
    listener = CutListener(listen(f"shm://{tmp_path}/s", secret=SECRET))
    serve(0, listener=listener)
    replicas = Replicas({"s": listener.address}, secret=SECRET)
    asker = reach(0, replicas=replicas)
    piece = two_pieces().of_table("t3")[0].name
    bags = make_ask("t3", "sum", [list(range(60))] * 300, weighted=True)
    before = replicas.links[0].channel.statistics()
    (value,) = asker.begin([replace(bags, table=piece)], "1")()
    assert value.shape == (300, 16)
    sent = replicas.links[0].channel.statistics()
    numbers = sum(part.nbytes for part in (bags.ids, bags.offsets, bags.weights) if part is not None)
    assert (sent.copies - before.copies, sent.copied_bytes - before.copied_bytes) == (2, numbers)
    answering = listener.channels[0]
    wait_for(lambda: answering.statistics().copied_bytes == value.nbytes)  # it counts after it has sent
    assert answering.statistics().copies == 1


def _plus_one(number: int, version: str, pieces: HeldPieces) -> PreparedUpdate:
    """All rows of table t3 greater by one, as that shard writes them."""
    rows = {"float32_32": (torch.arange(26, 90), WEIGHTS["t3"] + 1)}
    writes = tuple(RowWrite(matrix=matrix, ids=ids, rows=new) for matrix, ids, new in pieces.writes(rows))
    assert len(writes) == 1, number
    return PreparedUpdate(version=version, dense_version="", writes=writes)


def test_rows_are_of_the_version_that_was_asked_for(serve) -> None:
    """A shard with another version says so and sends no rows; once all have the new one, its rows are there."""
    held = held_by(two_pieces(), WEIGHTS)
    workers = [serve(number, held=held[number]) for number in range(2)]
    tables = merged([reach(number, worker) for number, worker in enumerate(workers)])
    assert equal(tables.lookup(ASKS))
    workers[0].apply_update(_plus_one(0, "2", held[0]))
    for version in ("1", "2"):
        tables.version = version
        with pytest.raises(OtherVersion, match=r"has version [12], not [12]"):
            tables.lookup(ASKS)
    workers[1].apply_update(_plus_one(1, "2", held[1]))
    assert equal(tables.lookup(ASKS), {**WEIGHTS, "t3": WEIGHTS["t3"] + 1})
    assert workers[0].metrics()["other_versions_total"] == 1


def test_a_lost_shard_fails_what_needs_it_and_comes_back(serve) -> None:
    """Without shard 1 a lookup of its rows fails by its name, others go on; when it listens again all are answered."""
    workers = [serve(number) for number in range(2)]
    address = workers[1].addresses[0]
    asker = reach(1, workers[1])
    tables = merged([reach(0, workers[0]), asker])
    assert equal(tables.lookup(ASKS))
    workers[1].stop(drain_s=0)
    for _ in range(2):
        with pytest.raises(ShardLost, match="shard 1 of shop") as lost:
            tables.lookup(ASKS)
        assert lost.value.back_in_s is not None
        assert lost.value.back_in_s >= 1.0
    first_half = [make_ask("t2", "rows", [[0]])]  # too narrow for columns: its first row is on shard 0
    assert equal(tables.lookup(first_half), asks=first_half)
    serve(1, address=address)
    wait_for(lambda: asker.up == 1)
    assert equal(tables.lookup(ASKS))


def row_of(number: int) -> LookupRequest:
    """A row of what shard 0 has of t3."""
    return LookupRequest(table=two_pieces().of_table("t3")[0].name, mode="rows", ids=torch.tensor([number]))


@pytest.mark.parametrize("lost", [True, False])
def test_a_twin_answers_for_a_replica_that_is_lost_or_silent(serve, lost: bool) -> None:
    """A lookup that is at a replica when that is lost is asked of the other one, and nobody notices; one that stops
    answering costs it `twin_after_s`."""
    gate = _Gated(0)
    first, twin = serve(0, held=gate), serve(0)
    asker = reach(0, first, twin, twin_after_s=WAIT_S if lost else 0.05)
    wait_for(lambda: asker.up == 2)
    pending = []

    def is_asked() -> bool:  # the twin may answer a lookup before the next one, which then is its own, too
        pending.append(asker.begin([row_of(3)], "1"))
        return gate.asked.wait(0.01)

    wait_for(is_asked)
    if lost:
        first.stop(drain_s=0)
    for one in pending:
        assert torch.equal(one()[0], WEIGHTS["t3"][3:4, :16])
    assert lost or asker.twins > 0
    gate.may_answer.set()


def test_a_shard_that_does_not_answer_in_time_is_lost(serve) -> None:
    """A silent shard without a twin is an error after the time-out."""
    gate = _Gated(0)
    worker = serve(0, held=gate)
    tables = merged([reach(0, worker, answer_timeout_s=0.1, twin_after_s=0.05), reach(1, serve(1))])
    with pytest.raises(ShardLost, match="shard 0 of shop: it did not answer in time"):
        tables.lookup(ASKS)
    gate.may_answer.set()


def test_what_a_shard_has_not_is_refused(serve) -> None:
    """A piece that a shard does not serve is refused by name, and so is an id outside; the channel goes on."""
    worker = serve(0)
    asker = reach(0, worker)
    with pytest.raises(ShardRefused, match="nowhere"):
        asker.begin([LookupRequest(table="nowhere", mode="rows", ids=torch.tensor([1]))], "1")()
    with pytest.raises(ShardRefused, match="id 64"):
        asker.begin([row_of(64)], "1")()
    with pytest.raises(ValueError, match="pooling needs offsets"):
        asker.begin([LookupRequest(table="t", mode="sum", ids=torch.tensor([1]))], "1")
    (value,) = asker.begin([row_of(63)], "1")()
    assert value.shape == (1, 16)


def test_shards_that_do_not_add_up_are_not_asked(serve, caplog: pytest.LogCaptureFixture) -> None:
    """Who expects another shard, or another deal of the tables, does not connect, and says in one sentence why."""
    worker = serve(0)
    other = make_weights(shapes=((8, 32), (19, 32), (3, 5), (64, 32), (1, 5)))
    for asks, said in ((who(1), "shard is 1, not 0: shards must be deployed together"), (who(0, other), "plan is")):
        with caplog.at_level(logging.WARNING):
            made = RemoteShard(Replicas({"s": worker.addresses[0]}, secret=SECRET).connect, asks)
            wait_for(lambda said=said: said in caplog.text and "cannot connect" in caplog.text)  # type: ignore[misc]
        assert not made.up
        made.close()
        caplog.clear()


_GOOD = {"kind": "rows", "number": 1, "of": "1"}
_PIECE = two_pieces().of_table("t0")[0].name


@pytest.mark.parametrize(
    ("header", "buffers"),
    [
        ({**_GOOD, "kind": "row", "asks": []}, [b"", b""]),
        ({**_GOOD, "number": -1, "asks": []}, [b"", b""]),
        ({**_GOOD, "of": 1, "asks": []}, [b"", b""]),
        ({**_GOOD, "asks": []}, [b""]),
        ({**_GOOD, "asks": []}, [b"", bytes(7)]),
        ({**_GOOD, "asks": [[_PIECE, "rows", 2, -1, False]]}, [b"", bytes(8)]),
        ({**_GOOD, "asks": [[_PIECE, "rows", 1 << 50, -1, False]]}, [b"", bytes(8)]),
        ({**_GOOD, "asks": [[_PIECE, "sum", 1, 1, False]]}, [b"", bytes(24)]),
        ({**_GOOD, "asks": [[_PIECE, "sum", 1, -1, False]]}, [b"", bytes(8)]),
        ({**_GOOD, "asks": [[_PIECE, "max", 0, 0, True]]}, [b"", bytes(8)]),
        ({**_GOOD, "asks": [[_PIECE, "median", 0, 0, False]]}, [b"", bytes(8)]),
        ({**_GOOD, "asks": [[0]]}, [b"", b""]),
    ],
    ids=range(12),
)
def test_bad_clients_are_cut_off(
    serve, header: dict[str, Any], buffers: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that sends what no client sends is disconnected and logged; others are served."""
    worker = serve(0)
    with connect(worker.addresses[0], secret=SECRET) as client, caplog.at_level(logging.WARNING):
        client.send(greeting("hello", WIRE_VERSION, who(0).payload()))
        client.recv(WAIT_S).release()
        client.send(header, buffers)
        with pytest.raises(PeerLost):
            client.recv(WAIT_S)
    assert "dropping client" in caplog.text
    assert reach(0, worker).up == 1
