"""From modules to programs: what is kept, what is turned into something else, what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.execute import run_reference
from plait_disagg.graph.inputs import Bag, Dense, Input
from plait_disagg.graph.program import LOOKUP
from support.graph import model


class Everyone(nn.Module):
    """Looks across rows: what must be refused."""

    inputs: tuple[Input, ...] = (Dense("x", "item", (4,)),)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, *, x):
        return getattr(self, self.how)(x).sum(dim=1)

    def mean_over_rows(self, x):
        return x - x.mean(dim=0)

    def all_pairs(self, x):
        return x @ x.transpose(0, 1) @ x

    def neighbours(self, x):
        return torch.cat([x[1:], x[:1]], dim=0)

    def whole_sum(self, x):
        return x / x.sum()

    def noise(self, x):
        return x + torch.rand_like(x)

    def counted_rows(self, x):
        return x * x.shape[0]

    def numbered_rows(self, x):
        return x + torch.arange(x.shape[0]).unsqueeze(1)

    def where_positive(self, x):
        return x[x.sum(1) > 0]

    def fixed_rows(self, x):
        return x + torch.zeros(41, 4)

    def lookup_of_constant(self, x):
        return self.weight[x.to(torch.int64).clamp(0, 3)[:, 0]]


class _Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)

    def forward(self, *, x):
        left, right = self.weight.split(3, dim=0)
        mask = torch.ones(4, 4).tril()
        mixed = x @ (left + right).T @ torch.softmax(left, dim=1) @ mask
        return (mixed * self.scale + torch.tensor([0.5, 0.0, 0.0, 1.0])).sum(dim=1)


def test_constants_of_all_kinds_are_computed_at_capture():
    """Buffers that are not saved, literals, split and transposed weights: contiguous constants, and the module's
    values.
    """
    module = _Constants().eval()
    captured = capture(module, (Dense("x", shape=(4,)),))
    assert all(tensor.is_contiguous() for tensor in captured.constants.values())
    assert len({port.name for port in captured.program.constants}) == len(captured.constants)
    x = torch.randn(5, 4)
    values = run_reference(captured.program, captured.constants, None, {"x": x, "user_of": torch.arange(5)})
    torch.testing.assert_close(values[captured.program.outputs[0][1].name], module(x=x))
    assert not any(node.op in ("aten.split.Tensor", "aten.tril.default") for node in captured.program.nodes)


def test_constants_and_tables_are_the_modules_own_memory():
    """Capturing a model of gigabytes copies none of it."""
    module, captured = model("small")
    assert captured.tables["history"].data_ptr() == module.history.weight.data_ptr()
    assert captured.constants["bottom.0.weight"].data_ptr() == module.bottom[0].weight.data_ptr()


@pytest.mark.parametrize(
    ("how", "operator", "why"),
    [
        ("mean_over_rows", "aten.mean.dim", "along the rows"),
        ("all_pairs", "aten.matmul.default", "rows meet rows"),
        ("neighbours", "aten.slice.Tensor", "rows must stay"),
        ("whole_sum", "aten.sum.default", "over all rows at once"),
        ("noise", "aten.rand_like.default", "random"),
        ("counted_rows", "aten.mul.Tensor", "as a number"),
        ("numbered_rows", "aten.arange", "by their place"),
        ("where_positive", "aten.index.Tensor", ""),
        ("fixed_rows", "aten.add.Tensor", "fixes the number of rows"),
        ("lookup_of_constant", "aten.index.Tensor", "depend on the request"),
    ],
)
def test_what_looks_across_rows_is_refused_by_name_and_line(how, operator, why):
    """A model that cannot be batched is refused with the operator, the reason, and the author's own line."""
    module = Everyone(how).eval()
    with pytest.raises(UnsupportedOperator) as refused:
        capture(module, module.inputs)
    assert refused.value.operator.startswith(operator)
    assert why in refused.value.why
    assert Path(__file__).name in refused.value.where


def test_a_model_in_training_mode_is_refused():
    """Dropout and batch statistics would make an answer random: eval() comes first."""
    with pytest.raises(UnsupportedOperator, match=r"eval\(\)"):
        capture(Everyone("mean_over_rows"), Everyone.inputs)


class _Bags(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, **{"mode": "sum", "include_last_offset": True, **options})

    def forward(self, *, a, a_offsets, b, b_offsets):
        return (self.table(a, a_offsets) + self.table(b, self.chosen(a_offsets, b_offsets))).sum(dim=1)

    def chosen(self, a_offsets, b_offsets):
        return b_offsets


class _Crossed(_Bags):
    def chosen(self, a_offsets, b_offsets):
        return a_offsets


BAGS = (Bag("a"), Bag("b"))


def test_a_bag_must_be_looked_up_with_its_own_offsets():
    """Another bag's offsets would pool other rows' ids."""
    with pytest.raises(UnsupportedOperator, match="its own offsets"):
        capture(_Crossed().eval(), BAGS)


def test_padding_in_a_bag_is_served_only_where_it_changes_nothing():
    """A row of zeros in a sum may be looked up; in a mean over offsets, ids that do not count would count."""
    ops = [node.op for node in capture(_Bags(padding_idx=2).eval(), BAGS).program.nodes]
    assert ops.count(LOOKUP) == 2
    with pytest.raises(UnsupportedOperator, match="padding_idx"):
        capture(_Bags(padding_idx=2, mode="mean").eval(), BAGS)


def test_a_table_of_another_dtype_is_refused():
    """Tables are given as float32; how rows are stored is chosen when a model is packaged."""
    with pytest.raises(UnsupportedOperator, match="float16"):
        capture(_Bags().eval().half(), BAGS)


class _Wrong(nn.Module):
    def forward(self, *, x):
        return {"a": x, "b": (x, x)}


def test_nested_outputs_are_refused():
    """Outputs are a tensor, a tuple or a dict of tensors."""
    with pytest.raises(UnsupportedOperator, match="dict of tensors"):
        capture(_Wrong().eval(), (Dense("x"),))
