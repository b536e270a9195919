"""Models of public libraries, unmodified: four of the zoo, as `plait bench zoo` judges all."""

from __future__ import annotations

import pytest

from plait_bench.benchmark import cache_folder
from plait_bench.zoo import FOLDER, install, judge

pytestmark = pytest.mark.slow

FOUR = ("deepctr-din", "rechub-bst", "recbole-sasrec", "torchrec-dlrm")


def test_a_model_of_each_library():
    """They are packaged, score as their modules do over 100 requests, and send no more than a cut by hand."""
    folder = cache_folder() / FOLDER
    install(folder, print)
    found = {one["variant"]: one for one in judge(folder, FOUR)}
    assert found.keys() == set(FOUR)
    for name, one in found.items():
        assert "refused" not in one, f"{name}: {one.get('refused')}"
        assert one["millionths"] < 10, name
        assert one["crossing_bytes"] <= one["by_hand_bytes"], name
