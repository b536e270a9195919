"""The designers under their conformance suite; adding one is one fixture."""

from __future__ import annotations

from functools import partial

import pytest

from plait_autoconfig.designers import maker_of
from plait_autoconfig.designers.morphling import MorphlingDesigner
from plait_autoconfig.designers.protocols import MakesDesigner
from plait_autoconfig.designers.testing import DesignerConformance
from plait_bench.autoconfig.forest_order import ForestOrderDesigner


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


class TestPortfolio(DesignerConformance):
    """The static order of the library."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("portfolio")


class TestMorphling(DesignerConformance):
    """A meta-trained network."""

    several_goals = False

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor, with a shorter training: the promises hold for any network."""
        return partial(MorphlingDesigner, meta_steps=10)


class TestPlait(DesignerConformance):
    """plait's own."""

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("plait")


class TestRgpe(DesignerConformance):
    """An ensemble of Gaussian processes."""

    several_goals = False

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """The registered constructor."""
        return maker_of("rgpe")


class TestForestOrder(DesignerConformance):
    """The benchmark's static order."""

    several_goals = False

    @pytest.fixture
    def make(self) -> MakesDesigner:
        """Not registered: it belongs to the benchmark."""
        return ForestOrderDesigner
