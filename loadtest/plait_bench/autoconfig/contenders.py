"""The designers that are compared, and how each is made for a task: pre-trained on the library, once.

Pre-training is part of a designer, not of a search: where all tasks of a suite share a library, what one instance
learned is handed to the next, as a product would keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait_autoconfig.designers import make_designer
from plait_autoconfig.designers.morphling import MorphlingDesigner
from plait_autoconfig.designers.plait_designer import PlaitDesigner
from plait_autoconfig.designers.protocols import Designer
from plait_autoconfig.designers.rgpe import RgpeDesigner
from plait_bench.autoconfig.forest_order import ForestOrderDesigner
from plait_bench.autoconfig.tasks import TuningTask

OURS = "plait"
SYSTEMS = (
    "plait", "random", "grid", "sobol", "optuna-tpe", "optuna-tpe-eager", "optuna-gp", "optuna-gp-eager", "portfolio",
    "forest-order", "morphling", "rgpe",
)  # fmt: skip
LEARNERS = ("plait", "portfolio", "forest-order", "morphling", "rgpe")
"""Those that a library changes."""


@dataclass
class Maker:
    """Makes designers of one name for the tasks of one suite, and records how long learning from the library took."""

    name: str
    shared: bool
    pretrain_s: list[float] = field(default_factory=list)
    _learned: dict[str, dict[str, object]] = field(default_factory=dict)

    def __call__(self, task: TuningTask, seed: int) -> Designer:
        """Return a designer for a fresh search."""
        service = task.service
        if self.name == "forest-order":
            return self._forest_order(task, seed)
        if self.name not in _LEARNERS:
            return make_designer(
                self.name, service.space, service.objective, seed=seed, library=task.library, context=service.context
            )
        key = "" if self.shared else task.name
        if key not in self._learned:
            started_s = time.perf_counter()
            self._learned[key] = _LEARNERS[self.name](task)
            self.pretrain_s.append(time.perf_counter() - started_s)
        return _CLASSES[self.name](
            service.space, service.objective, seed=seed, library=task.library, context=service.context,
            **self._learned[key],
        )  # fmt: skip

    def _forest_order(self, task: TuningTask, seed: int) -> Designer:
        service = task.service
        made = ForestOrderDesigner(
            service.space, service.objective, seed=seed, library=task.library, context=service.context
        )
        if task.library:  # the order is the same for all seeds
            if task.name not in self._learned:
                started_s = time.perf_counter()
                self._learned[task.name] = {"predicted": made.predicted}
                self.pretrain_s.append(time.perf_counter() - started_s)
            made.__dict__.update(self._learned[task.name])
        return made


_CLASSES: Mapping[str, Callable[..., Designer]] = {
    "plait": PlaitDesigner,
    "morphling": MorphlingDesigner,
    "rgpe": RgpeDesigner,
}


def _plait(task: TuningTask) -> dict[str, object]:
    service = task.service
    made = PlaitDesigner(service.space, service.objective, seed=0, library=task.library, context=service.context)
    return {"pretrained": made.pretrained}


def _morphling(task: TuningTask) -> dict[str, object]:
    service = task.service
    made = MorphlingDesigner(service.space, service.objective, seed=0, library=task.library, context=service.context)
    return {"network": made.meta_model}


def _rgpe(task: TuningTask) -> dict[str, object]:
    service = task.service
    made = RgpeDesigner(service.space, service.objective, seed=0, library=task.library, context=service.context)
    return {"ensemble": made.ensemble}


_LEARNERS: Mapping[str, Callable[[TuningTask], dict[str, object]]] = {
    "plait": _plait,
    "morphling": _morphling,
    "rgpe": _rgpe,
}
