"""The designers under their conformance suite; adding one is one fixture."""

from __future__ import annotations

import pytest

from plait_autoconfig.designers import maker_of
from plait_autoconfig.designers.protocols import MakesDesigner
from suites.designers import DesignerConformance


class TestRandom(DesignerConformance):
    """Uniform without replacement."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("random")


class TestGrid(DesignerConformance):
    """In order."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("grid")


class TestSobol(DesignerConformance):
    """Evenly spread."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("sobol")


class TestOptunaTpe(DesignerConformance):
    """Optuna's Parzen estimator."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("optuna-tpe")


class TestOptunaGp(DesignerConformance):
    """Optuna's Gaussian process."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("optuna-gp")


class TestPlait(DesignerConformance):
    """plait's own."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("plait")
