"""What tests of ranking models share: the package that can be refreshed, and workers in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait_disagg.package.read import Package
from support import refresh
from support.rank_fabric import Rig


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A model with int8, float16 and float32 tables, packaged once; who changes it makes a copy."""
    return refresh.packaged(tmp_path_factory.mktemp("refresh") / "parts")


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Workers in this process."""
    with Rig() as made:
        yield made
