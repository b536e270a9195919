"""Ray Serve's two ways of placing replicas, as far as they can be told from outside.

They see sums per node ("1.6 GPUs"), not devices. A node whose sum suffices but whose devices do not cannot start the
replica; Ray then spills it to another one, here the first in order that can. Replicas come one by one, in order of
arrival (Serve sorts a pending batch by size), and `RaySpreadPolicy` counts all replicas of a node, not those of one
deployment. [ray.serve._private.deployment_scheduler; neither has been run on Ray itself.]
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import Task, TaskPlacement


class _RayPolicy:
    """Takes the node of the highest rank among those whose sums suffice."""

    def _rank(self, state: ClusterState, task: Task) -> Ints:
        raise NotImplementedError

    def choose(self, state: ClusterState, task: Task) -> TaskPlacement | None:
        """Return the node of the highest rank, or the first that fits if that one's devices do not."""
        allowed = state.allows(task)
        fits = state.fits(task, np.arange(len(state.nodes)), allowed)
        first = int(fits.argmax())
        if not fits[first]:
            return None
        sums = (state.cpu >= task.cpu_milli) & (state.memory >= task.memory_mib) & (state.gpu_free >= task.total_milli)
        if allowed is not None:
            sums &= allowed
        node = int(np.where(sums, self._rank(state, task), np.iinfo(np.int64).min).argmax())
        if not fits[node]:
            node = first
        return TaskPlacement(node=node, devices=state.best_fit_devices(task, node))


class RayPackPolicy(_RayPolicy):
    """`RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1`: nodes in use first, then the least GPU, CPU and memory left."""

    _BITS: ClassVar[tuple[int, int]] = (46, 25)
    """Memory below 2^25 MiB, CPU below 2^21 milli-cores, GPU below 2^16: one int64 holds all three."""

    def _rank(self, state: ClusterState, task: Task) -> Ints:
        gpu, cpu = self._BITS
        left = (state.gpu_free - task.total_milli << gpu) + (state.cpu - task.cpu_milli << cpu) + state.memory
        return np.where(state.running.any(1), 0, np.int64(-1) << 62) - left


class RaySpreadPolicy(_RayPolicy):
    """Serve's default: the node with the fewest replicas."""

    def _rank(self, state: ClusterState, task: Task) -> Ints:
        return np.asarray(-state.running.sum(1))
