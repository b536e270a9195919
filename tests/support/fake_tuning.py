"""A measurer of a made-up service with the arguments that ``plait tune`` gives to plait's own."""

from __future__ import annotations

from pathlib import Path

from fakes.measurer import FakeMeasurer, fake_measurer

FACTORY = "support.fake_tuning:measurer"


def measurer(*, folder: Path, live: bool = False) -> FakeMeasurer:
    """The factory."""
    assert not live
    return fake_measurer(folder=folder)
