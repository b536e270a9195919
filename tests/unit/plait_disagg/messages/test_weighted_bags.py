"""A bag whose ids each come with a number, on its way to the halves (`package/test_package.py` has a model of one)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import Bag, Ids
from plait_disagg.graph.sample_inputs import sample
from plait_disagg.messages.check import check_request
from plait_disagg.values import ModelCard
from plait_serving.http.ranking.describe import example, metadata
from plait_serving.http.ranking.recommend import arrays_of
from plait_serving.ranking.inputs import Binder

INPUTS = (Bag("seen", "user", weighted=True), Ids("item"), Bag("tags", weighted=True, largest=5))
CARD = ModelCard(name="m", version="1", inputs=INPUTS, outputs={"score": ()}, id_rows={"seen": 20, "item": 20})


@pytest.mark.parametrize(
    "bad", [torch.ones(1), torch.ones(3, dtype=torch.float64), torch.tensor([1.0, float("nan"), 1])]
)
def test_wrong_weights_are_named(bad):
    """Another number of them, another dtype, no number."""
    tensors = sample(INPUTS, CARD.id_rows, candidates=1, ids_per_bag=3) | {"seen_weights": bad}
    with pytest.raises(BadInput, match="seen_weights"):
        check_request(CARD, tensors, request_id="r")


def test_arrays_and_rows_are_bound():
    """An example can be posted as it is; a row of /v1/recommend has its weights beside the ids."""
    card = dataclasses.replace(CARD, id_rows={**CARD.id_rows, "tags": 20})
    binder = Binder(INPUTS)
    kinds = {"INT64": np.int64, "FP32": np.float32}
    sent = {
        tensor["name"]: np.array(tensor["data"], kinds[tensor["datatype"]]).reshape(tensor["shape"])
        for tensor in example(card, 6)["inputs"]
    }
    assert check_request(card, binder.bind(sent), request_id="r").candidates == 6
    assert any(tensor["name"] == "tags_weights" for tensor in metadata("m", card)["inputs"])
    with pytest.raises(BadInput, match="seen_weights"):
        binder.bind({**sent, "seen_weights": np.ones(len(sent["seen"]) + 1, np.float32)})
    row = {"seen": [1, 2], "seen_weights": [0.5, 2]}
    assert arrays_of(INPUTS[:1], [row], "user")["seen_weights"].tolist() == [0.5, 2.0]
    with pytest.raises(BadInput, match="one number for each id"):
        arrays_of(INPUTS[:1], [{**row, "seen_weights": [1]}], "user")
