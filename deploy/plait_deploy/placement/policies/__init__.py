"""The policies by name. Adding one is a line here; the conformance suite (`tests/suites/placement_policies.py`) takes
its names from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait_deploy.errors import PlacementError
from plait_deploy.placement.policies.baselines import (
    BestFitPolicy,
    DotProductPolicy,
    FgdPolicy,
    FirstFitPolicy,
    GpuClusteringPolicy,
    GpuPackingPolicy,
    RandomPolicy,
    RayPackPolicy,
    RaySpreadPolicy,
)
from plait_deploy.placement.policies.plait import PlaitPolicy
from plait_deploy.placement.policies.scored import Policy, Ties
from plait_deploy.placement.values import TaskClass

OURS = "plait"
_MAKERS: Mapping[str, Callable[[Sequence[TaskClass], int], Policy]] = {
    OURS: lambda classes, _: PlaitPolicy(classes),
    "fgd": lambda classes, _: FgdPolicy(classes),
    "fgd-random-ties": lambda classes, seed: FgdPolicy(classes, ties=Ties.RANDOM, seed=seed),
    "fgd-best-fit-ties": lambda classes, _: FgdPolicy(classes, ties=Ties.BEST_FIT),
    "first-fit": lambda *_: FirstFitPolicy(),
    "best-fit": lambda *_: BestFitPolicy(),
    "gpu-packing": lambda *_: GpuPackingPolicy(),
    "gpu-clustering": lambda *_: GpuClusteringPolicy(),
    "dot-product": lambda *_: DotProductPolicy(),
    "random": lambda _, seed: RandomPolicy(seed=seed),
    "ray-pack": lambda *_: RayPackPolicy(),
    "ray-spread": lambda *_: RaySpreadPolicy(),
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, classes: Sequence[TaskClass], *, seed: int = 0) -> Policy:
    """Return a fresh policy. `classes`: all that may come, for those that look ahead. Raises `PlacementError`."""
    if name not in _MAKERS:
        raise PlacementError(f"there is no policy {name}; there are {', '.join(POLICIES)}")
    return _MAKERS[name](classes, seed)
