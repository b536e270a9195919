"""Imports without the garbage collector."""

from __future__ import annotations

import gc

import pytest

from plait_serving.imports import importing


def test_the_collector_rests_within_the_context_only():
    """It is off within, on again behind it, also after an error; what was made there is none of its business."""
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept = [[i] for i in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
    gc.unfreeze()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
