"""What a model says about its inputs, and the request that it gives as an example."""

from __future__ import annotations

import torch

from plait_disagg.graph.inputs import Dense, Ids
from plait_disagg.messages.check import check_request
from plait_disagg.values import ModelCard
from plait_serving.http.ranking.describe import example, metadata

INPUTS = (
    Ids("length", "user", min=1, max=50),
    Ids("month", min=3, max=4),
    Dense("share", low=0.25, high=0.75),
    Dense("x", low=0.5),
    Ids("item"),
)
CARD = ModelCard(name="m", version="1", inputs=INPUTS, outputs={"score": ()}, id_rows={"item": 9})


def test_the_example_keeps_to_declared_ranges():
    """It can be posted as it is: numbers that no table bounds are drawn from their range."""
    tensors = {
        tensor["name"]: torch.tensor(
            tensor["data"], dtype=torch.int64 if tensor["datatype"] == "INT64" else torch.float32
        ).reshape(tensor["shape"])
        for tensor in example(CARD, 200)["inputs"]
    }
    check_request(CARD, tensors, request_id="r")
    assert set(tensors["month"].tolist()) == {3, 4}
    assert tensors["share"].unique().numel() > 2


def test_the_model_tells_its_ranges():
    """A client reads them beside each tensor; what is open is left out."""
    told = {tensor["name"]: tensor["parameters"] for tensor in metadata("m", CARD)["inputs"]}
    assert told["length"] == {"kind": "ids", "side": "user", "minimum": 1, "maximum": 50}
    assert told["x"] == {"kind": "dense", "side": "item", "minimum": 0.5}
    assert told["item"] == {"kind": "ids", "side": "item"}
