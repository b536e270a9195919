"""Which base models an engine serves: those of its configuration, and those that are in a folder now."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.residents.base_model import BaseModel
from plait_serving.diffusion.residents.model_folder import FolderOfModels, FoundModel

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
"""Reading the state of every file of a hundred models takes some milliseconds, and every request asks what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFactory:
    """Where more models come from. `make` reads one, without its weights; it raises `ModelError`."""

    folder: FolderOfModels
    make: Callable[[str, Path], BaseModel]
    engine: Engine


class Roster:
    """The models by name, the first is what requests without one mean. Thread-safe.

    Every replica looks for itself, when it is asked what there is and when a request names a model that it does not
    know: so all of them serve what is in the folder, also those that start later.
    """

    def __init__(
        self,
        models: Mapping[str, BaseModel],
        factory: ModelFactory | None = None,
        *,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Take the models of the configuration, which stay; `refused`: those that cannot be used, with the reasons."""
        self._models = MappingProxyType(dict(models))
        self._factory = factory
        self._stamps: dict[str, str] = {}
        self._left_out = dict(refused or {})
        self._refused: Mapping[str, tuple[str, str]] = {}  # the stamp and the reason
        self._looked = (0, -math.inf)
        self._lock = threading.Lock()

    @property
    def models(self) -> Mapping[str, BaseModel]:
        """The models now; it does not change any more once it was returned."""
        return self._models

    @property
    def refused(self) -> Mapping[str, str]:
        """Why models are not served, by name; `another NAME` is not, though one of that name is."""
        models, found = self._models, self._refused
        in_folder = {(f"another {name}" if name in models else name): reason for name, (_, reason) in found.items()}
        return {**self._left_out, **in_folder}

    def look(self, *, wait: bool = True) -> None:
        """Take in what came into the folder, and give up what left it. `wait` False: unless nothing was moved since
        somebody did; files that change in their place are then seen within `_PERIOD_S`."""
        if self._factory is None:
            return
        moved = self._factory.folder.changed_ns() != self._looked[0]
        if not self._lock.acquire(blocking=wait or moved):
            return
        try:
            now, looked = (self._factory.folder.changed_ns(), time.monotonic()), self._looked
            if not wait and now[0] == looked[0] and now[1] < looked[1] + _PERIOD_S:
                return
            found = self._factory.folder.list()
            stamps = {name: each.stamp for name, each in found.items()}
            for name in [name for name, stamp in self._stamps.items() if stamps.get(name) != stamp]:
                self._give_up(self._factory, name)
            self._refused = {name: why for name, why in self._refused.items() if name in found}
            for name, each in found.items():
                if name not in self._stamps and self._refused.get(name, ("",))[0] != each.stamp:
                    self._take_in(self._factory, name, each)
            self._looked = now  # last: until then nobody may take the list of before for what there is
        finally:
            self._lock.release()

    def _give_up(self, factory: ModelFactory, name: str) -> None:
        _log.info("%s has left the folder of models, or was replaced: what it has accepted is finished", name)
        del self._stamps[name]
        self._models = MappingProxyType({other: model for other, model in self._models.items() if other != name})
        factory.engine.retire(name)

    def _take_in(self, factory: ModelFactory, name: str, found: FoundModel) -> None:
        try:
            if name in self._models:
                raise ModelError(f"{found.folder}: the configuration has another model of that name")
            if not factory.engine.may_add(name):
                return  # requests of the one that it replaces are in work: at the next look
            model = factory.make(name, found.folder)
            check_no_twin(model, self._models)
        except ModelError as error:
            self._refused = {**self._refused, name: (found.stamp, error.message)}
            _log.error("%s is not served: %s", name, error.message)
            return
        factory.engine.add(model.served)
        self._refused = {other: why for other, why in self._refused.items() if other != name}
        self._stamps[name] = found.stamp
        self._models = MappingProxyType({**self._models, name: model})
        _log.info("%s is served from now on: %s", name, found.folder)


def check_no_twin(model: BaseModel, others: Mapping[str, BaseModel]) -> None:
    """Raise `ModelError` if a model's folder has another name already."""
    for name, other in others.items():
        if other.folder.exists() and other.folder.samefile(model.folder):
            raise ModelError(f"{model.folder} is {name}'s folder; another name for it belongs into images.aliases")
