"""What may be wrong with a placement's inputs. `PlacementError` is the base; its text is one sentence for people.

PlacementError
    ClusterError    the description of the cluster does not add up
    TaskError       a task, or a class of tasks, that cannot exist
    TraceError      a file of tasks or nodes that is not as published
    NoRoomError     a replica that fits no node, even an empty one
"""

from __future__ import annotations


class PlacementError(ValueError):
    """The base of this package's errors."""


class ClusterError(PlacementError):
    """The description of the cluster does not add up. Its author must act."""


class TaskError(PlacementError):
    """A task that cannot exist, such as 0.5 of each of two GPUs."""


class TraceError(PlacementError):
    """A trace with missing columns or values."""


class NoRoomError(PlacementError):
    """A replica that fits no node of the cluster, even if all are empty."""
