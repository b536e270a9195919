"""Models built the way that libraries of recommendation models build theirs: small twins of eight of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from plait_disagg.graph.inputs import Dense, Ids, Input


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
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
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


LIBRARY_MODELS = (Packed, Heads, Folded, Transformer, Masked, Recurrent, OneTable, Bare)
