"""What cannot be packaged is said once, with the operator's own line, and with what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait_disagg.errors import BadInput
from plait_disagg.graph.capture import capture, obstacles
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import Bag, Dense, Ids, check_inputs, input_from_json, input_to_json
from plait_disagg.graph.sample_inputs import sample
from plait_disagg.messages.check import check_request
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.values import ModelCard


def refusal(forward, inputs):
    """Return the refusal of a module with this forward."""
    module = type("Model", (nn.Module,), {"forward": forward})().eval()
    with pytest.raises(UnsupportedOperator) as refused:
        capture(module, inputs)
    return refused.value


@pytest.mark.parametrize(
    ("forward", "inputs", "said"),
    [
        (lambda self, x: x, (Dense("x"), Dense("u")), "no parameter for the input 'u'; it takes x"),
        (lambda self, bag: bag, (Bag("bag"),), "'bag_offsets', the offsets of the bag 'bag'"),
        (lambda self, b, b_offsets: b, (Bag("b", weighted=True),), "'b_weights', the weights of the bag 'b'"),
        (lambda self, x, y: x + y, (Dense("x"),), "takes 'y', and no input of that name"),
    ],
)
def test_a_forward_that_takes_other_inputs_is_told_which(forward, inputs, said):
    """Not torch's "unexpected keyword argument"; a bag needs two parameters, or three."""
    assert said in str(refusal(forward, inputs))


def decides(self, x):
    """Go one way for all rows."""
    return x.sum(1) if (x > 0).any() else x.sum(1) * 2


def casts(self, x):
    """Have torch.export put operators into a graph of their own."""
    with torch.autocast("cpu", torch.bfloat16):
        made = x @ x.new_ones(3, 2)
    return made.float().sum(1)


def joins(self, a, a_offsets, b, b_offsets):
    """Hold bags as a KeyedJaggedTensor does; given its parts by key, it does not join them."""
    return torch.cat([a, b]).float()


@pytest.mark.parametrize(
    ("forward", "inputs", "said", "line"),
    [
        (decides, [Dense("x", shape=(3,))], ("if x.any()", "torch.where"), ""),
        (casts, [Dense("x", shape=(3,))], ("wrap_with_autocast", "a `with` of torch.autocast"), "x.new_ones(3, 2)"),
        (joins, [Bag("a"), Bag("b")], ("jt_dict",), "torch.cat([a, b])"),
    ],
)
def test_what_to_write_instead_is_said_with_the_line(forward, inputs, said, line):
    """In words, beside what is wrong."""
    refused = refusal(forward, inputs)
    assert all(word in str(refused) for word in said)
    assert "test_refusals.py" in refused.where
    assert line in refused.where


def test_a_packed_history_says_what_to_write():
    """`pack_padded_sequence` reads lengths as numbers; torch's own message would not say so."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(4, 4, batch_first=True)

        def forward(self, x, length):
            packed = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
            return self.gru(packed)[1][0].sum(1)

    with pytest.raises(UnsupportedOperator, match="read the one at length - 1"):
        capture(Packed().eval(), (Dense("x", shape=(5, 4)), Ids("length", min=1, max=5)))


@pytest.mark.parametrize(
    "call",
    [
        lambda self, x: F.dropout(x * 2, 0.5, inplace=True).sum(1),
        lambda self, x: F.dropout1d(x.unsqueeze(1), 0.5).sum((1, 2)),
        lambda self, x: F.alpha_dropout(x, 0.5, training=True).sum(1),
        lambda self, x: F.batch_norm(x, None, None, training=True).sum(1),
    ],
)
def test_what_ignores_evaluation_mode_is_named_with_its_line(call):
    """The module is in evaluation mode, so `module.eval()` would not help: the call itself is told otherwise."""
    said = refusal(call, (Dense("x", shape=(4,)),))
    assert "although the module is in evaluation mode: give it training=self.training" in said.why
    assert "module.eval()" not in str(said)
    assert "test_refusals.py" in said.where
    assert " F." in said.where


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.FeatureAlphaDropout])
def test_layers_that_drop_are_nothing_in_evaluation_mode(kind):
    """The program has no trace of them."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.drops = kind()

        def forward(self, x):
            return self.drops(x.unsqueeze(1)).sum((1, 2))

    captured = capture(Drops().eval(), (Dense("x", shape=(4,)),))
    assert [node.op for node in captured.program.nodes] == ["aten.unsqueeze.default", "aten.sum.dim_IntList"]


class _Obstacles(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x, y):
        first = x - x.mean(dim=0)
        second = torch.cumsum(first, dim=0)
        third = self.attention(*(y,) * 3)[0]
        return (second * 2).sum(1) + third.sum((1, 2))


def test_all_obstacles_are_listed_in_one_pass_and_each_once():
    """Behind a refused operator the search goes on; what reads a refused value is not refused again."""
    found = obstacles(_Obstacles().eval(), (Dense("x", shape=(4,)), Dense("y", shape=(5, 4))))
    operators = [one.operator for one in found]
    assert operators[:2] == ["aten.mean.dim", "aten.cumsum.default"]
    assert all("test_refusals.py" in one.where for one in found)
    hints = [one.why.count("inside nn.MultiheadAttention") for one in found]
    assert 1 in hints
    assert set(hints) <= {0, 1}
    assert obstacles(nn.Linear(1, 1).eval(), (Dense("input"),)) == ()


class _Checked(nn.Module):
    """Takes the step before `length`, which must not be 0."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(9, 4)
        self.eval()

    def forward(self, history, length, price):
        made = self.rows(history).gather(1, (length - 1).view(-1, 1, 1).expand(-1, -1, 4)).squeeze(1)
        return made.sum(1) * price.squeeze(1)


def inputs_of(**declared):
    """Return the inputs of `_Checked`."""
    return [Ids("history", "user", (5,)), Ids("length", "user", **declared), Dense("price")]


def test_a_module_that_raises_on_samples_names_the_input(tmp_path):
    """One sentence with the input that caused it and what to declare, and no traceback of torch."""
    with pytest.raises(PackageError, match=r"random length .*out of bounds.*Ids\(\"length\", min=1, max=50\)"):
        write_package(tmp_path / "model", _Checked(), inputs_of(), name="model")
    write_package(tmp_path / "declared", _Checked(), inputs_of(min=1, max=5), name="model")


def test_a_nan_of_the_models_own_is_told_as_such(tmp_path):
    """With the input and its numbers: a logarithm of what may be negative, a mean over what may be nothing. A bag that
    the model does not have is named."""

    class Spends(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True)

        def forward(self, bought, bought_offsets, price):
            mean = self.rows(bought, bought_offsets).sum(1) / bought_offsets.diff()
            return mean + price.squeeze(1).log()

    class Nothing(Spends):
        def forward(self, bought, bought_offsets, price):
            return super().forward(bought, bought_offsets, price * 0 - 1)

    bought, high = Bag("bought", "user"), Dense("price", low=0.5, high=2)
    for module, price, said in [
        (Spends(), Dense("price"), r'random price \[-\d.*\]; declare .* as in Dense\("price", low=0, high=1\)$'),
        (Spends(), high, r"random bought \[\]$"),
        (Nothing(), high, r"random request: bought \[.*\], price \[.*\]$"),
    ]:
        with pytest.raises(PackageError, match=f"^the model itself returns NaN for a {said}"):
            options = PackageOptions(ids_per_bag={"bought": 2})
            write_package(tmp_path / "model", module.eval(), [bought, price], name="model", options=options)
    with pytest.raises(ValueError, match=r"bag bougth: the model has bought$"):
        options = PackageOptions(ids_per_bag={"bougth": 2})
        write_package(tmp_path / "model", Spends().eval(), [bought, price], name="model", options=options)


def test_declared_ranges_are_kept_by_samples_and_checked_in_requests():
    """A number beyond is refused with the tensor's name; the ends belong to the range."""
    inputs = (
        Ids("length", max=5),
        Ids("month", min=1, max=12),
        Dense("share", low=0.0, high=1.0),
        Dense("x", low=-1.0),
    )
    card = ModelCard(name="m", version="1", inputs=inputs, outputs={"score": ()})
    tensors = sample(inputs, {}, candidates=300, seed=1)
    assert tensors["length"].max() == 5
    assert tensors["length"].min() == 0
    assert (int(tensors["month"].min()), int(tensors["month"].max())) == (1, 12)
    check_request(card, tensors, request_id="r")
    for name, bad, text in [
        ("length", 6, "takes 0 to 5"),
        ("length", -1, "takes 0 to 5"),
        ("month", 0, "takes 1 to 12"),
        ("share", 1.5, "takes 0.0 to 1.0"),
        ("x", -2.0, "at least -1.0"),
    ]:
        changed = {**tensors, name: tensors[name].clone()}
        changed[name][7] = bad
        with pytest.raises(BadInput, match=f"{name}: number 7 is .*{text}"):
            check_request(card, changed, request_id="r")


def test_declared_ranges_are_stored_and_read_back():
    """Inputs without a range, and bags without weights, are stored as they always were."""
    for item in (Ids("b", min=1, max=2), Dense("c", low=0.5), Dense("d", low=0.0, high=1.0), Bag("e", weighted=True)):
        assert input_from_json(input_to_json(item)) == item
    assert input_to_json(Ids("a")) == {"kind": "ids", "name": "a", "side": "item", "shape": []}
    assert "weighted" not in input_to_json(Bag("tags"))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([Ids("a", min=5, max=2)], "range 5 to 2 is empty"),
        *[([Dense("a", shape=shape)], "input a: shape .* is no tuple of sizes") for shape in (8, (0,))],
        ([Dense(5)], "input 5: a name must match"),
        ([Bag("b", largest="5")], "input b: largest must be"),
        ([Bag("tags"), Ids("tags_weights")], "tags_weights: the name is taken twice"),
    ],
)
def test_a_declaration_that_can_not_be_is_refused_by_the_inputs_name(inputs, said):
    """The commonest mistake is a shape that is a number alone."""
    with pytest.raises(ValueError, match=said):
        check_inputs(inputs)
