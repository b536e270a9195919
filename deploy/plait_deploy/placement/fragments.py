"""Fragmentation of nodes (FGD, section 4): idle GPU that the average task could not use.

    F_n(m) = sum_g R_g [R_g < d_m]   if m has GPUs and fits n (model, c_n >= D_m, k_m devices with R_g >= d_m)
    F_n(m) = sum_g R_g               otherwise
    F_n    = sum_m p_m F_n(m)

What the average task *can* use is sum_g R_g - F_n. For k_m = 1 it is a sum over devices of R_g times the popularity of
classes with D_m <= c_n and d_m <= R_g; for k_m > 1 it is the number w of wholly free devices times the popularity of
classes with D_m <= c_n and k_m <= w. Both are prefix sums, tabled per GPU model: a node costs one look-up for each
device, however many classes there are. Everything is an integer (weights for popularities), so that equal scores are
equal. `tests/support/placement_twin.py` has the sums as written above.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait_deploy.placement.device_tables import DeviceTables, usable
from plait_deploy.placement.state import ClusterState, Ints
from plait_deploy.placement.values import WHOLE, TaskClass


class FragmentTables(DeviceTables):
    """Values are what the average task can use of nodes, in milli-GPUs times `weight`; a gain is F before minus F after
    placing the task."""

    def __init__(self, classes: Sequence[TaskClass], state: ClusterState) -> None:
        super().__init__(classes, state, models=state.models, table=state.model)
        parts = np.zeros((len(state.models), len(self._cpus) + 1, WHOLE + 1), np.int64)
        for index, model in enumerate(state.models):
            for each in usable(classes, model):
                if each.task.gpus == 1:
                    parts[index, self._rank(each.task) :, each.task.gpu_milli :] += each.weight
        self._parts: Ints = (parts * np.arange(WHOLE + 1)).reshape(-1)

    def fragments(self, state: ClusterState) -> Ints:
        """Return F of each node (N,), in milli-GPUs times `weight`."""
        return state.gpu_free * self.weight - self.values(state, np.arange(len(state.nodes)))

    def _of_devices(self, nodes: Ints, cpu: Ints, devices: Ints, free: Ints) -> Ints:  # noqa: ARG002  # the seam's
        return np.asarray(self._parts[self._rows(nodes, cpu)[:, None] * (WHOLE + 1) + devices])


def integer_scores(gain: Ints, weight: int) -> NDArray[np.int64]:
    """Return FGD's published score: int(100 sigmoid(gain in GPUs)), 0..100. One step is about 0.04 GPU near 0."""
    return np.asarray(100.0 / (1.0 + np.exp(gain / (-WHOLE * weight))), np.int64)
