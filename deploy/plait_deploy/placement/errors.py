"""What may be wrong with a placement's inputs. `PlacementError` is the base; its text is one sentence for people.

PlacementError
    ClusterError    the description of the cluster does not add up
    TaskError       a task, or a class of tasks, that cannot exist
    NoRoomError     a replica that fits no node, even an empty one
"""

from __future__ import annotations


class PlacementError(ValueError):
    """The base of this package's errors."""


class ClusterError(PlacementError):
    """The description of the cluster does not add up. Its author must act."""


class TaskError(PlacementError):
    """A task that cannot exist, such as 0.5 of each of two GPUs."""


class NoRoomError(PlacementError):
    """A replica that fits no node of the cluster, even if all are empty."""
