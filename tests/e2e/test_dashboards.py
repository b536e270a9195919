"""What operators look at: dashboards and alerts read metrics that a server has."""

from __future__ import annotations

import re

import pytest

from plait.demo.run import PEOPLE
from support.asking import ask
from support.prometheus import lint
from support.server import REPOSITORY

pytestmark = pytest.mark.cluster


def test_dashboards_and_alerts_read_metrics_that_are_there(starters):
    """Every metric of deploy/dashboards is in the /metrics of a server that has made an image and ranked."""
    image = {"prompt": "red apple", "num_inference_steps": 2, "seed": 1}
    ranking = {"model": "picks", "user": PEOPLE[0].features(), "candidates": "all", "top_k": 5}
    for path, body in (("/v1/images/generations", image), ("/v1/recommend", ranking)):
        assert ask(starters() + path, body).status == 200
    text = ask(starters() + "/metrics").text
    there = set(re.findall(r"^(?:# TYPE )?(plait_\w+)", text, re.MULTILINE))
    files = (REPOSITORY / "deploy" / "dashboards").iterdir()
    named = {name for file in files for name in re.findall(r"\bplait_\w+", file.read_text())}
    assert len(named) > 20
    assert named - there == set()
    assert list(lint(text)) == []
