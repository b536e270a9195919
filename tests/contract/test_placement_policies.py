"""Every placement policy keeps the protocol."""

from __future__ import annotations

import pytest

from plait_deploy.placement.policies import POLICIES, make_policy
from suites.placement_policies import MakePolicy, PolicyContract


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> MakePolicy:
    """The maker of one policy."""
    return lambda classes, seed: make_policy(request.param, classes, seed=seed)


class TestPolicies(PolicyContract):
    """The suite, for each name."""
