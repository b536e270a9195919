"""A mix that cannot build its requests."""

from __future__ import annotations

from plait_loadtest.errors import ScenarioError


class BrokenMix:
    """Implements `Mix`, badly."""

    kinds = ("broken",)

    def kind(self, index):
        """The only one."""
        return 0

    def build(self, index):
        """Never works."""
        raise ScenarioError("mix.0.controlnets.images: no such picture")
