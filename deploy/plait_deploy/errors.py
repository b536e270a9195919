"""What a renderer and a placement refuse: each is one sentence for people.

DeployError            what is asked for cannot be deployed
└── PlacementError     a placement's inputs
    ├── ClusterError   the description of the cluster does not add up
    └── TaskError      a task, or a class of tasks, that cannot exist
"""

from __future__ import annotations


class DeployError(ValueError):
    """What is asked for cannot be deployed: one sentence that names the key to change."""


class PlacementError(DeployError):
    """The base of the errors of placement."""


class ClusterError(PlacementError):
    """The description of the cluster does not add up. Its author must act."""


class TaskError(PlacementError):
    """A task that cannot exist, such as 0.5 of each of two GPUs."""
