"""The seam of a placement policy. Contracts only."""

from __future__ import annotations

from typing import Protocol

from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import Task, TaskPlacement


class Policy(Protocol):
    """Chooses a node and devices for one task at a time.

    It never changes the state. What it chooses fits; it finds a place whenever there is one. It may remember scores of
    one state between calls, and notices by `touched` what has changed there. A seed fixes what it does.
    """

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return where the task goes, or None if it fits nowhere now."""
