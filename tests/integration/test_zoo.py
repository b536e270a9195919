"""Models of public libraries, unmodified: eight of the zoo, as `plait bench zoo` judges all."""

from __future__ import annotations

import pytest

from plait_bench.benchmark import cache_folder
from plait_bench.zoo import FOLDER, install, judge

pytestmark = pytest.mark.slow

EIGHT = (
    "deepctr-deepfm",
    "deepctr-din",
    "deepctr-autoint",
    "rechub-bst",
    "rechub-din",
    "recbole-stamp",
    "recbole-sasrec",
    "torchrec-dlrm",
)


def test_eight_models_of_four_libraries():
    """They are packaged, score as their modules do over 100 requests, and send no more than a cut by hand."""
    folder = cache_folder() / FOLDER
    install(folder, print)
    found = {one["variant"]: one for one in judge(folder, EIGHT)}
    assert found.keys() == set(EIGHT)
    for name, one in found.items():
        assert "refused" not in one, f"{name}: {one.get('refused')}"
        assert one["millionths"] < 10, name
        assert one["crossing_bytes"] <= one["by_hand_bytes"], name
