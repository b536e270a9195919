"""Leaving rows out of what crosses: which can be left out, what is sent instead, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait_disagg.errors import RankError
from plait_disagg.graph.program import LOOKUP, Node, Port, Program, Ref
from plait_disagg.messages import hot_rows
from plait_disagg.messages.check import check_request
from plait_disagg.messages.hot_rows import HotRows, RowReceiver, RowSavings, RowSender
from plait_disagg.messages.layout import layout_of_crossing
from plait_disagg.messages.wire import dense_message, parse_dense
from plait_disagg.package.read import Package, without_rows
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.tables.values import OutOfRange, Table
from plait_fabric.layouts import Part, layout_of, parse_layout
from plait_fabric.memory.pool import Pool
from plait_fabric.rpc.fields import WireError
from support import rank_rows as kit

POOL = Pool.anonymous(1 << 20)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The model `Match`; no test changes it."""
    return kit.packaged(tmp_path_factory.mktemp("rows") / "match")


def _lookup(name: str, ids: str, *, mode: str = "rows") -> Node:
    kwargs = {"table": name, "mode": mode}
    return Node(name=name, op=LOOKUP, args=(Ref(ids), None, None), kwargs=kwargs, shape=(-1, 8), rows="item")


class TestWhatCanBeLeftOut:
    def test_bare_rows_become_their_ids_and_nothing_else_changes(self) -> None:
        """Rows that cross and that the CN does not read; not pooled ones, not those it adds to something."""
        modulo = Node(name="small", op="aten.remainder.Scalar", args=(Ref("b"), 5), shape=(-1,), dtype="int64")
        nodes = (
            modulo,
            _lookup("bare", "a"),
            _lookup("processed", "small"),
            _lookup("pooled", "b", mode="sum"),
            _lookup("read", "a"),
            Node(name="sum", op="aten.add.Tensor", args=(Ref("read"), Ref("pooled")), shape=(-1, 8)),
        )
        names = ("a", "bare", "processed", "pooled", "read", "sum")
        ports = tuple(Port(name=name, shape=(-1,), dtype="int64", rows="item") for name in ("a", "b"))
        program = Program(inputs=ports, constants=(), nodes=nodes, outputs=tuple((name, Ref(name)) for name in names))
        made, left_out = without_rows(program)
        assert left_out == {"bare": "bare", "processed": "processed"}
        assert dict(made.outputs) == {name: Ref(name) for name in names} | {"bare": Ref("a"), "processed": Ref("small")}
        assert tuple(name for name, _ in made.outputs) == names
        assert {node.name for node in made.nodes} == {"small", "pooled", "read", "sum"}


class TestIds:
    @pytest.mark.parametrize("policy", ["clip", "hash"])
    def test_rows_of_the_ids_are_the_rows_that_crossed_before(self, tmp_path: Path, policy: OutOfRange) -> None:
        """Ids outside the table too: the policy decides before the cache sees them."""
        sparse = kit.packaged(tmp_path / "match", out_of_range=policy).sparse()
        tensors = {
            "liked": torch.tensor([[0, -1, kit.ITEMS, 2**62, -(2**62), 5]]),
            "item": torch.tensor([kit.ITEMS + 7, 3]),
            "kind": torch.tensor([-5, kit.KINDS]),
        }
        package = kit.open_package(tmp_path / "match")
        request = check_request(package.card(), tensors, request_id="r")
        crossing, ids = sparse.run([request]), sparse.run_ids([request])
        for port, table in sparse.row_ports.items():
            assert ids[port].dtype is torch.int64
            rows = sparse.rows(table.name, ids[port].reshape(-1)).view(*ids[port].shape, table.dim)
            assert torch.equal(rows, crossing[port])


def _message(package: Package, sender: RowSender, *seeds: int) -> tuple[dict[str, torch.Tensor], HotRows]:
    return sender.encode(package.sparse().run_ids([kit.request(package, seed) for seed in seeds]))


def _sender(package: Package, cache_rows: int = 8) -> RowSender:
    return RowSender(package.sparse(), WorkerKnobs(cache_rows=cache_rows), RowSavings())


class TestWhatIsRefused:
    def test_a_batch_out_of_step(self, package: Package) -> None:
        """A missed batch is noticed, and one for other caches than the channel has; number 0 begins anew at any
        time."""
        sender, receiver = _sender(package), RowReceiver()
        first, missed, late = (_message(package, sender, seed) for seed in range(3))
        receiver.decode(*first)
        assert missed[1].number == 1
        with pytest.raises(ValueError, match="batch 2 came where 1 was due"):
            receiver.decode(*late)
        with pytest.raises(ValueError, match="other caches"):
            RowReceiver().decode(*late)
        receiver.decode(*_message(package, _sender(package, 4), 1))

    @pytest.mark.parametrize(
        ("name", "tensor"),
        [
            ("hot.0.rows", torch.zeros(0, kit.DIM)),
            ("hot.0.new", torch.zeros(99, dtype=torch.int32)),
            ("hot.0.new", torch.full((8,), 8, dtype=torch.int32)),
            ("items", torch.full((7,), -1, dtype=torch.int32)),
        ],
    )
    def test_tensors_that_no_sender_makes(self, package: Package, name: str, tensor: torch.Tensor) -> None:
        """Other numbers of rows, or slots that are not there; dtypes and dimensions are the layout's."""
        tensors, hot = _message(package, _sender(package), 1)
        assert name in tensors
        tensors[name] = tensor
        with pytest.raises(ValueError, match=r"hot|slot|rows"):
            RowReceiver().decode(tensors, hot)

    def test_more_memory_than_a_peer_may_ask_for(self, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        """Neither the slots nor the rows that slots stand for; the sender keeps both bounds by itself."""
        tensors, hot = _message(package, _sender(package), 1)
        with pytest.raises(ValueError, match="bytes"):
            RowReceiver().decode(tensors, replace(hot, slots=((1 << 31) - 1, 8)))
        largest = 2 * 40 * 4 * kit.DIM
        monkeypatch.setattr(hot_rows, "MAX_BYTES", largest)
        _, bounded = _message(package, _sender(package, 1_000_000), 1)
        assert bounded.slots == (40, kit.KINDS)
        many = tensors | {"items": torch.zeros(81, dtype=torch.int32)}
        with pytest.raises(ValueError, match="at most"):
            RowReceiver().decode(many, hot)
        with pytest.raises(RankError, match="at most"):
            _message(package, _sender(package), 1, 2, 3, 4, 5)

    @pytest.mark.parametrize(
        "hot",
        [
            [0, [8, 8]],
            ["0", [8], [["items"]]],
            [True, [8], [["items"]]],
            [0, [0], [["items"]]],
            [0, [1 << 31], [["items"]]],
            [0, 8, [["items"]]],
            [0, [8, 8], [["items"], ["items"]]],
            [0, [8], [[5]]],
            [0, [8], []],
        ],
    )
    def test_a_header_that_no_sender_makes(self, hot: object) -> None:
        """Refused field by field."""
        layout = parse_layout("f4:i:3:items")
        header, _ = dense_message(1, layout, {"items": torch.zeros(2, 3)}, [2], POOL, wire="float32")
        buffers = [memoryview(bytearray(24))]
        assert parse_dense(header, buffers, layout).hot is None
        with pytest.raises(WireError):
            parse_dense(header | {"hot": hot}, buffers, layout)


def test_a_cached_batch_of_rows_can_be_merged(package: Package) -> None:
    """What was laid end to end before still is; a batch with ids of its own still is not."""
    tensors, hot = _message(package, _sender(package), 1, 2)
    agreed = layout_of_crossing(package.dense().crossing, package.card().inputs)
    for extra, mergeable in (({}, True), ({"history": torch.zeros(2, 6, dtype=torch.int64)}, False)):
        layout = layout_of([*agreed.parts, *[Part("i8", "u", (6,), name) for name in extra]])
        header, buffers = dense_message(1, layout, tensors | extra, [7, 7], POOL, wire="float32", hot=hot)
        views = [memoryview(bytearray(it.memory if hasattr(it, "memory") else it)) for it in buffers]
        assert parse_dense(header, views, layout).mergeable is mergeable


def test_ports_of_one_table_share_its_cache(package: Package) -> None:
    """An id that one port brought is a hit for the other."""
    sparse = package.sparse()
    assert sparse.row_ports["items"] == sparse.row_ports["items_2"]
    assert isinstance(sparse.row_ports["items"], Table)
    savings = RowSavings()
    sender = RowSender(sparse, WorkerKnobs(cache_rows=kit.ITEMS), savings)
    ids = {"items": torch.tensor([4, 5]), "kinds": torch.tensor([0, 0]), "items_2": torch.tensor([[1, 2, 3, 4, 5, 6]])}
    sender.encode(ids)
    assert savings.stored == 6 + 1  # of 10 ids; 3 repeat one of the message
    sender.encode(ids | {"items": torch.tensor([1, 2]), "items_2": torch.tensor([[4, 4, 4, 4, 4, 4]])})
    assert (savings.stored, savings.hits) == (7, 10)
