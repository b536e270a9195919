"""The built-in scenario ``picks`` sends what the starter recommender takes."""

from __future__ import annotations

import json

import torch

from plait_disagg.messages.check import check_request
from plait_disagg.package.read import open_package
from plait_loadtest.load import load_scenario
from plait_loadtest.plan import make_plan
from plait_serving.starter.ranking.picks import FOLDER

DTYPES = {"FP32": torch.float32, "INT64": torch.int64}


def test_every_request_of_the_scenario_is_accepted():
    """Names, sides, shapes and ids of 20 requests pass the check that the server makes."""
    card = open_package(FOLDER / "picks").card()
    mix = make_plan(load_scenario("picks", {"mix.0.binary": False})).mix
    for index in range(20):
        inputs = json.loads(mix.build(index).body)["inputs"]
        tensors = {
            entry["name"]: torch.tensor(entry["data"], dtype=DTYPES[entry["datatype"]]).reshape(entry["shape"])
            for entry in inputs
        }
        assert check_request(card, tensors, request_id=str(index)).candidates == 100
