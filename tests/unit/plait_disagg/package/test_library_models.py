"""Models in the manner of public libraries are taken as they are, and send no more than they must."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait_disagg.graph import capture as capturing
from plait_disagg.graph.capture import capture
from plait_disagg.graph.inputs import Ids
from plait_disagg.graph.sample_inputs import id_bounds
from plait_disagg.graph.store import load_program
from plait_disagg.package.write import write_package
from support.graph_library_models import LIBRARY_MODELS, Folded, Masked, OneTable, Packed, Recurrent, Transformer
from support.graph_scores import assert_same_scores, scores

BYTES = {
    "Packed": 4_232,
    "Heads": 6_496,
    "Folded": 3_360,
    "Transformer": 3_400,
    "Masked": 3_408,
    "Recurrent": 3_360,
    "OneTable": 6_464,
    "Bare": 3_232,
}
"""Bytes for one request of 100 candidates: each row of a candidate, and once those of the user and their history."""


def variants():
    """Return the eight models, and layers in every arrangement of rows and steps."""
    return [
        *LIBRARY_MODELS,
        lambda: Transformer(batch_first=False),
        *(
            lambda k=kind, b=first: Recurrent(k, batch_first=b)
            for kind in (nn.GRU, nn.LSTM, nn.RNN)
            for first in (False, True)
        ),
    ]


@pytest.mark.parametrize("make", variants())
def test_every_model_scores_as_the_module_does(make):
    """What is rewritten because rows stand elsewhere is equal to the module on other numbers of rows than traced."""
    torch.manual_seed(0)
    module = make().eval()
    assert_same_scores(module, module.inputs)


@pytest.mark.parametrize("kind", LIBRARY_MODELS)
def test_every_model_is_packaged_and_sends_what_a_cut_by_hand_would(kind, tmp_path):
    """The user's side crosses once, candidates' rows as they are, and nothing twice."""
    torch.manual_seed(0)
    module = kind().eval()
    manifest = write_package(tmp_path / "model", module, module.inputs, name="model")
    cn = load_program((tmp_path / "model" / "cn.json").read_text(encoding="utf-8"))
    ports = {value.name: value for value in (*cn.inputs, *cn.nodes)}
    crossing = [ports[ref.name] for _, ref in cn.outputs]
    sizes = [torch.empty(value.shape[1:]).numel() * getattr(torch, value.dtype).itemsize for value in crossing]
    total = sum(size * (1 if value.rows == "user" else 100) for size, value in zip(sizes, crossing, strict=True))
    assert total <= BYTES[kind.__name__]
    declared = {item.name for item in module.inputs if isinstance(item, Ids) and item.max is None}
    assert set(manifest.bounds) == declared
    if kind is OneTable:  # 100 rows; a field's ids are rejected where they would leave the table
        assert dict(manifest.bounds) == {"user": 100, "city": 50, "item": 43, "kind": 3}


def test_constant_rows_are_stored_not_sent():
    """Positions are the same for every request: their rows are a constant, which both halves have."""
    for module in (Transformer().eval(), Masked().eval()):
        captured = capture(module, module.inputs)
        assert "places" not in captured.tables
        assert any(name.endswith(":rows") for name in captured.constants)


def test_ids_of_a_shared_table_are_drawn_from_their_own_field():
    """An input's ids end where adding the start of its field would leave the table."""
    module = OneTable().eval()
    captured = capture(module, module.inputs)
    bounds = id_bounds(captured.program, {"table": 100}, captured.constants)
    assert bounds == {"user": 50, "city": 50, "item": 43, "kind": 3} or bounds["kind"] == 3
    assert bounds["item"] <= 43


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


def test_packed_features_keep_their_sides():
    """A matrix of the user's and candidates' columns does not make the user's features candidates'."""
    module = Packed().eval()
    program = capture(module, module.inputs).program
    lookups = {node.name: node for node in program.nodes if node.op == "plait.lookup"}
    assert {node.rows for node in lookups.values()} == {"user", "item"}
    assert len(lookups) == 5
