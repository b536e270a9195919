"""A bag whose ids each come with a number: on every way from a request to the halves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from plait_disagg.errors import BadInput
from plait_disagg.graph.capture import capture
from plait_disagg.graph.errors import UnsupportedOperator
from plait_disagg.graph.inputs import Bag, Ids, check_inputs, input_from_json, input_to_json
from plait_disagg.graph.sample_inputs import collate, sample
from plait_disagg.messages.check import check_request
from plait_disagg.messages.layout import layout_of_inputs
from plait_disagg.package.items import Items, StoredItems
from plait_disagg.package.write import write_package
from plait_disagg.queue.batch import join
from plait_disagg.values import ModelCard
from plait_serving.http.ranking.describe import example, metadata
from plait_serving.http.ranking.rank_body import arrays_of
from plait_serving.ranking.inputs import Binder
from support.graph_scores import assert_same_scores

INPUTS = (Bag("seen", "user", weighted=True), Ids("item"), Bag("tags", weighted=True, largest=5))
CARD = ModelCard(name="m", version="1", inputs=INPUTS, outputs={"score": ()}, id_rows={"seen": 20, "item": 20})


class Looked(nn.Module):
    """As TorchRec's weighted collection looks up."""

    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)

    def forward(self, seen, seen_offsets, seen_weights, item, tags, tags_offsets, tags_weights):
        user = self.rows(seen, seen_offsets, seen_weights)
        rows = nn.functional.embedding(item, self.rows.weight)
        return (user * rows * (1 + self.rows(tags, tags_offsets, tags_weights))).sum(1)


def requests(*candidates):
    """Return random requests that were checked."""
    return [
        check_request(
            CARD, sample(INPUTS, CARD.id_rows, candidates=n, ids_per_bag=4, seed=n, ragged=True), request_id="r"
        )
        for n in candidates
    ]


def test_the_halves_score_as_the_module_does(tmp_path):
    """Captured, cut, and verified on batches of several requests and on candidates in another order."""
    torch.manual_seed(0)
    assert_same_scores(Looked().eval(), INPUTS)
    manifest = write_package(tmp_path / "model", Looked().eval(), INPUTS, name="model")
    assert manifest.inputs == INPUTS


def test_a_forward_without_the_weights_is_refused():
    """The bag needs three parameters."""

    class Without(nn.Module):
        def forward(self, tags, tags_offsets):
            return tags

    with pytest.raises(UnsupportedOperator, match="'tags_weights', the weights of the bag 'tags'"):
        capture(Without().eval(), (Bag("tags", weighted=True),))


def test_declarations_are_stored_and_names_kept_free():
    """Bags without weights are stored as they always were, and no other input may have the name of a bag's weights."""
    assert input_from_json(input_to_json(INPUTS[0])) == INPUTS[0]
    assert "weighted" not in input_to_json(Bag("tags"))
    with pytest.raises(ValueError, match="twice"):
        check_inputs([Bag("tags"), Ids("tags_weights")])


def test_a_batch_has_the_weights_of_its_requests():
    """As collated one by one; and a request's layout has room for them."""
    asked = requests(3, 1, 4)
    wanted = collate(INPUTS, [request.tensors for request in asked], [3, 1, 4])
    made = join(INPUTS, asked).tensors
    assert all(torch.equal(made[name], wanted[name]) for name in made)
    parts = {part.name: part for part in layout_of_inputs(INPUTS).parts}
    assert (parts["tags_weights"].code, parts["tags_weights"].rows) == ("f4", "f")


@pytest.mark.parametrize(
    "bad", [torch.ones(1), torch.ones(3, dtype=torch.float64), torch.tensor([1.0, float("nan"), 1])]
)
def test_wrong_weights_are_named(bad):
    """Another number of them, another dtype, no number."""
    tensors = {
        "seen": torch.tensor([1, 2, 3]),
        "seen_offsets": torch.tensor([0, 3]),
        "seen_weights": bad,
        "item": torch.zeros(1, dtype=torch.int64),
        "tags": torch.zeros(0, dtype=torch.int64),
        "tags_offsets": torch.zeros(2, dtype=torch.int64),
        "tags_weights": torch.zeros(0),
    }
    with pytest.raises(BadInput, match="seen_weights"):
        check_request(CARD, tensors, request_id="r")


def test_arrays_and_rows_are_bound():
    """An example can be posted as it is; a row of /v1/recommend has its weights beside the ids."""
    card = dataclasses.replace(CARD, id_rows={**CARD.id_rows, "tags": 20})
    binder = Binder(INPUTS, largest_candidates=10)
    kinds = {"INT64": np.int64, "FP32": np.float32}
    sent = {
        tensor["name"]: np.array(tensor["data"], kinds[tensor["datatype"]]).reshape(tensor["shape"])
        for tensor in example(card, 6)["inputs"]
    }
    tensors, candidates = binder.bind(sent)
    check_request(card, tensors, request_id="r")
    assert candidates == 6
    assert any(tensor["name"] == "tags_weights" for tensor in metadata("m", card)["inputs"])
    with pytest.raises(BadInput, match="seen_weights"):
        binder.bind({**sent, "seen_weights": np.ones(len(sent["seen"]) + 1, np.float32)})
    row = {"seen": [1, 2], "seen_weights": [0.5, 2]}
    assert arrays_of(INPUTS[:1], [row], "user")["seen_weights"].tolist() == [0.5, 2.0]
    with pytest.raises(BadInput, match="one number for each id"):
        arrays_of(INPUTS[:1], [{**row, "seen_weights": [1]}], "user")


def test_known_items_have_weights():
    """Those of the items that were asked for, in their order."""
    features = {
        "item": torch.arange(3),
        "tags": torch.tensor([7, 8, 9]),
        "tags_offsets": torch.tensor([0, 2, 2, 3]),
        "tags_weights": torch.tensor([0.5, 0.25, 1.0]),
    }
    found = StoredItems(Items(features=features), INPUTS).gather(torch.tensor([2, 0]))
    assert found["tags"].tolist() == [9, 7, 8]
    assert found["tags_weights"].tolist() == [1.0, 0.5, 0.25]
    with pytest.raises(ValueError, match="tags_weights"):
        StoredItems(Items(features={**features, "tags_weights": torch.ones(2)}), INPUTS)
