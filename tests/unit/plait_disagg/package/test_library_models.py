"""Models in the manner of public libraries are taken as they are, and send no more than they must."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait_disagg.graph import capture as capturing
from plait_disagg.graph.inputs import Dense, Ids, Input
from plait_disagg.graph.sample_inputs import sample
from plait_disagg.graph.store import load_program
from plait_disagg.messages.check import check_request
from plait_disagg.messages.layout import layout_of_crossing
from plait_disagg.package.read import open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_fabric import Pool
from plait_fabric.layouts import RowCounts, pack
from support.graph_models import Small, Zoo
from support.graph_models import Weighted as WeightedBags
from support.graph_scores import assert_same_scores, scores


class Packed(nn.Module):
    """deepctr: one float matrix with a column for each id, sliced; a wide part changed in place; conv1d over fields."""

    inputs: tuple[Input, ...] = (
        Ids("user", "user"),
        Dense("age", "user"),
        Ids("history", "user", (6,)),
        Ids("item", "item"),
        Dense("price", "item"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(50, 8), "item": nn.Embedding(70, 8)})
        self.wide = nn.ModuleDict({"user": nn.Embedding(50, 1), "item": nn.Embedding(70, 1)})
        self.fields = nn.Conv1d(2, 4, 1)
        self.top = nn.Linear(8 + 8 + 8 + 4 * 8 + 2, 1)

    def forward(self, **features):
        columns = [features[item.name].float().reshape(features[item.name].shape[0], -1) for item in self.inputs]
        x = torch.cat(columns, 1)
        ids = {"user": x[:, 0:1].long(), "item": x[:, 8:9].long()}
        logit = x.new_zeros((x.shape[0], 1))
        logit += torch.cat([self.wide[name](ids[name]) for name in ids], -1).sum(-1)
        rows = [self.tables[name](ids[name]) for name in ids]
        past = self.tables["item"](x[:, 2:8].long()).mean(1)
        dense = torch.cat([x[:, 1:2], x[:, 9:10]], -1)
        crossed = torch.relu(self.fields(torch.cat(rows, 1))).flatten(1)
        deep = torch.cat([torch.flatten(torch.cat(rows, -1), 1), past, crossed, dense], -1)
        logit += self.top(deep)
        return torch.sigmoid(logit).squeeze(1)


class Heads(nn.Module):
    """deepctr's AutoInt: heads are stacked in front of the rows; tensordot; a residual added in place."""

    inputs: tuple[Input, ...] = (Ids("user", "user", (3,)), Ids("item", "item", (2,)))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(4)])
        self.top = nn.Linear(40, 1)

    def forward(self, *, user, item):
        x = torch.cat([self.table(user), self.table(item)], 1)
        q, k, v = (torch.tensordot(x, weight, dims=([-1], [0])) for weight in self.weights[:3])
        q, k, v = (torch.stack(torch.split(part, 4, dim=2)) for part in (q, k, v))
        scores = F.softmax(torch.einsum("bnik,bnjk->bnij", q, k), dim=-1)
        made = torch.cat(torch.split(torch.matmul(scores, v), 1), dim=-1).squeeze(0)
        made += torch.tensordot(x, self.weights[3], dims=([-1], [0]))
        return self.top(F.relu(made).flatten(1)).squeeze(1)


class Folded(nn.Module):
    """rechub's DIN: steps are folded into the rows for a layer with batch statistics, and unfolded again."""

    inputs: tuple[Input, ...] = (Ids("history", "user", (5,)), Ids("item", "item"))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.unit = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.PReLU(), nn.Linear(16, 1))
        self.unit[1].running_mean.normal_()

    def forward(self, *, history, item):
        h, v = self.table(history.long()), self.table(item.long())
        target = v.unsqueeze(1).expand(-1, 5, -1)
        weights = self.unit(torch.cat([h, target, h * target], -1).view(-1, 24)).view(-1, 5)
        return (h * weights.unsqueeze(-1)).sum(1).mul(v).sum(1)


class Transformer(nn.Module):
    """rechub's BST: an nn.TransformerEncoder over history and item, with a padding mask; constant positions."""

    inputs: tuple[Input, ...] = (Ids("history", "user", (5,)), Ids("item", "item"))

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(40, 8), nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.batch_first = batch_first

    def forward(self, *, history, item):
        x = torch.cat([self.table(history), self.table(item).unsqueeze(1)], 1)
        x = x + self.places(torch.arange(6, device=x.device).unsqueeze(0).expand_as(x[..., 0]))
        padding = torch.cat([history == 0, torch.zeros(item.shape[0], 1, dtype=torch.bool)], 1)
        made = self.encoder(x if self.batch_first else x.transpose(0, 1), src_key_padding_mask=padding)
        return (made[:, -1] if self.batch_first else made[-1]).sum(1)


class Masked(nn.Module):
    """recbole's SASRec: a mask of where(mask, 0.0, -1e4), and the last of `length` steps gathered."""

    inputs: tuple[Input, ...] = (
        Ids("history", "user", (5,)),
        Ids("length", "user", min=1, max=5),
        Ids("item", "item"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(40, 8, padding_idx=0), nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, *, history, length, item):
        seen = (history != 0).unsqueeze(1).unsqueeze(2)
        mask = torch.tril(seen.expand((-1, -1, history.size(-1), -1)))
        mask = torch.where(mask, 0.0, -10000.0)
        places = torch.arange(history.size(1), dtype=torch.long).unsqueeze(0).expand_as(history)
        x = self.table(history) + self.places(places)
        scores = x @ x.transpose(-1, -2) + mask.squeeze(1)
        y = x + torch.softmax(scores, -1) @ x
        y = self.attention(*(y.transpose(0, 1),) * 3)[0].transpose(0, 1)
        last = y.gather(1, (length - 1).view(-1, 1, 1).expand(-1, -1, 8)).squeeze(1)
        return (last * self.table(item)).sum(1)


class Recurrent(nn.Module):
    """recbole's GRU4Rec: a recurrent layer over the history."""

    inputs: tuple[Input, ...] = (Ids("history", "user", (5,)), Ids("item", "item"))

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, *, batch_first: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.steps = kind(8, 8, batch_first=batch_first)

    def forward(self, *, history, item):
        x = self.table(history)
        made = self.steps(x if self.steps.batch_first else x.transpose(0, 1))[0]
        return ((made[:, -1] if self.steps.batch_first else made[-1]) * self.table(item)).sum(1)


class OneTable(nn.Module):
    """recbole's FM: all fields in one table, each from where its rows begin."""

    inputs: tuple[Input, ...] = (Ids("user", "user"), Ids("city", "user"), Ids("item", "item"), Ids("kind", "item"))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50 + 7 + 40 + 3, 8)
        self.starts = torch.tensor([0, 50, 57, 97])

    def forward(self, **features):
        ids = torch.cat([features[item.name].unsqueeze(1) for item in self.inputs], 1)
        x = self.table(ids + ids.new_tensor(self.starts).unsqueeze(0))
        return (x.sum(1) ** 2 - (x**2).sum(1)).sum(1)


class Bare(nn.Module):
    """rechub's DCNv2: a bare squeeze() that loses a single candidate's row, so that the module cannot score one."""

    inputs: tuple[Input, ...] = (Ids("user", "user"), Ids("item", "item"))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.mix = nn.Parameter(torch.randn(16, 16) * 0.2)

    def forward(self, *, user, item):
        x = torch.cat([self.table(user), self.table(item)], 1).unsqueeze(2)
        x = (x * torch.matmul(self.mix, x) + x).squeeze()
        best = torch.topk(x, 3, dim=1)
        return best.values.sum(1) + torch.sort(x, dim=1).values[:, 0] + best.indices[:, 0] / 16


BYTES = {
    Packed: 4_232,
    Heads: 6_496,
    Folded: 3_360,
    Transformer: 3_400,
    Masked: 3_408,
    Recurrent: 3_360,
    OneTable: 6_464,
    Bare: 3_232,
}
"""Bytes for one request of 100 candidates: each row of a candidate, and once those of the user and their history."""


@pytest.mark.parametrize("kind", BYTES)
def test_every_model_is_packaged_and_sends_what_a_cut_by_hand_would(kind, tmp_path):
    """Its halves score as it does; the user's side crosses once, candidates' rows as they are, and nothing twice."""
    torch.manual_seed(0)
    module = kind().eval()
    manifest = write_package(tmp_path / "model", module, module.inputs, name="model")
    cn = load_program((tmp_path / "model" / "cn.json").read_text(encoding="utf-8"))
    ports = {value.name: value for value in (*cn.inputs, *cn.nodes)}
    crossing = [ports[ref.name] for _, ref in cn.outputs]
    sizes = [torch.empty(value.shape[1:]).numel() * getattr(torch, value.dtype).itemsize for value in crossing]
    total = sum(size * (1 if value.rows == "user" else 100) for size, value in zip(sizes, crossing, strict=True))
    assert total <= BYTES[kind]
    assert_crosses_as_said(tmp_path / "model")
    declared = {item.name for item in module.inputs if isinstance(item, Ids) and item.max is None}
    assert set(manifest.bounds) == declared
    if kind is OneTable:  # 100 rows; a field's ids are rejected where they would leave the table
        assert dict(manifest.bounds) == {"user": 100, "city": 50, "item": 43, "kind": 3}


@pytest.mark.parametrize(
    "make",
    [
        partial(Transformer, batch_first=False),
        partial(Recurrent, nn.GRU, batch_first=False),
        partial(Recurrent, nn.LSTM),
        partial(Recurrent, nn.RNN, batch_first=False),
    ],
)
def test_rows_may_stand_behind_the_steps(make):
    """What is rewritten for rows in front is equal to the module on other numbers of rows than traced."""
    torch.manual_seed(0)
    module = make().eval()
    assert_same_scores(module, module.inputs)


@pytest.mark.parametrize("kind", [Small, Zoo, WeightedBags])
def test_bags_and_many_outputs_cross_as_the_hn_says(kind, tmp_path):
    """Also where another cutter leaves other tensors to cross."""
    module = kind().eval()
    write_package(tmp_path / "model", module, module.inputs, name="model", options=PackageOptions(cutter="prism"))
    assert_crosses_as_said(tmp_path / "model")


def assert_crosses_as_said(folder):
    """Check that one request and several make what the HN's layout says, every tensor of it and nothing else: others
    are not packed."""
    package = open_package(folder)
    card = package.card()
    layout = layout_of_crossing(package.dense().crossing, card.inputs)
    for candidates in ([7], [1], [3, 1, 5]):
        tensors = [
            sample(card.inputs, card.id_rows, candidates=n, seed=n, ids_per_bag=3, ragged=True) for n in candidates
        ]
        asked = [check_request(card, each, request_id="r") for each in tensors]
        crossing = package.sparse().run(asked)
        assert crossing.keys() == {part.name for part in layout.parts}
        counts = RowCounts(
            users=len(candidates),
            items=sum(candidates),
            flat=tuple(crossing[name].shape[0] for name in layout.given),
        )
        pack(layout, counts, crossing, Pool.anonymous(1 << 20), timeout_s=1.0)


@pytest.mark.parametrize("kind", [Folded, Transformer, OneTable])
def test_the_unfolded_program_makes_the_same_bits(kind, monkeypatch):
    """The naive twin of folding is not to fold: all bits stay."""
    torch.manual_seed(0)
    module = kind().eval()
    bounds = dict.fromkeys((item.name for item in module.inputs), 3)
    folded, _ = scores(module, module.inputs, candidates=30, seed=3, bounds=bounds)
    monkeypatch.setattr(capturing, "fold", lambda program, constants, _: (program, dict(constants)))
    plain, _ = scores(module, module.inputs, candidates=30, seed=3, bounds=bounds)
    assert torch.equal(folded, plain)
