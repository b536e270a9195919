"""Models of public libraries, unmodified: four of the zoo, as `plait bench zoo` judges all."""

from __future__ import annotations

import pytest

from plait_bench.benchmark import cache_folder
from plait_bench.zoo import FOLDER, install, judge

pytestmark = pytest.mark.slow

# What a cut by hand, right behind the tables, sends for 100 candidates: rows and numbers, the user's once.
BY_HAND_BYTES = {
    "deepctr-din": 11_388,
    "rechub-bst": 8_064,
    "recbole-sasrec": 30_888,
    "torchrec-dlrm": 12_948,
}


def test_a_model_of_each_library():
    """They are packaged, score as their modules do over 100 requests, and send no more than a cut by hand."""
    folder = cache_folder() / FOLDER
    install(folder, print)
    found = {one["variant"]: one for one in judge(folder, list(BY_HAND_BYTES))}
    assert found.keys() == BY_HAND_BYTES.keys()
    for name, one in found.items():
        assert "refused" not in one, f"{name}: {one.get('refused')}"
        assert one["millionths"] < 10, name
        assert one["crossing_bytes"] <= BY_HAND_BYTES[name], name
