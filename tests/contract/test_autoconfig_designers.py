"""The designers under their conformance suite; adding one is a line in the registry."""

from __future__ import annotations

import pytest

from plait_autoconfig.designers import DESIGNERS, maker_of
from plait_autoconfig.designers.base import Designer
from suites.designers import DesignerConformance


@pytest.fixture(params=DESIGNERS)
def make(request: pytest.FixtureRequest) -> type[Designer]:
    """The registered constructor."""
    return maker_of(request.param)


class TestDesigners(DesignerConformance):
    """The suite, for each name."""
