"""Owns an engine's base models: which there are, which are in memory, and what makes room for another.

They are loaded beside the compute thread, and leave between two steps.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from plait_serving.diffusion.errors import EngineError, ModelError
from plait_serving.diffusion.families.encoders import SharedEncoders
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.memory import MemoryReader, gigabytes
from plait_serving.diffusion.models.folder import FolderOfModels, FoundModel
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.models.switching import ModelDemand, Switch, next_switch, surplus
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.units import ImageJob

_log = logging.getLogger(__name__)

_DRAIN_SHARE = 1.0
"""Requests in work may end before their model leaves if that takes at most so many times what loading the other one
does: preparing them again is work, too, but whoever waits has waited long."""
_LOOK_S = 1.0
"""How often memory is measured. One model leaves at a time: what others let go of may still be in use."""
_PERIOD_S = 1.0
"""Reading the state of every file of a hundred models takes some milliseconds, and every request asks what there is."""
_KEPT_FREE_BYTES = 500_000_000
"""Idle models leave where less can be allocated: what requests and programs take until the next look, and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyStatistics:
    """Counts since the start, except `resident`: the names of the models in memory now, and `nbytes`, what they hold;
    `budget_bytes`: what they may hold now. `load_s`: what each was last loaded in."""

    resident: tuple[str, ...]
    nbytes: int
    budget_bytes: int
    loads: int
    load_s: Mapping[str, float]


class _Holdings:
    """What resident models really hold: a small model's programs are many times its file.

    Only the whole process can be measured. What it holds beyond all weights is shared out evenly; the sum is right.
    Weights count also where they are a file's.
    """

    def __init__(self, memory: MemoryReader, *, budget_bytes: int, here: Callable[[], Sequence[Model]]) -> None:
        """Take how memory is read, what the process may hold, and what returns the resident models."""
        self._memory, self._here = memory, here
        self._given_bytes = budget_bytes
        self.begin()

    def begin(self) -> None:
        """Measure; what the process holds now is no model's."""
        self._before_bytes = self._memory.held_bytes()
        self._budget_bytes = self._given_bytes - self._before_bytes
        self.look()

    def look(self) -> None:
        """Measure."""
        self._held_bytes = self._memory.held_bytes() - self._before_bytes
        self._left_bytes = self._memory.left_bytes()

    def give_back(self) -> None:
        """Return to the system what was freed, and measure."""
        self._memory.give_back()
        self.look()

    @property
    def all_bytes(self) -> int:
        """What all hold together."""
        return max(self._held_bytes, sum(model.nbytes for model in self._here()))

    @property
    def beyond_bytes(self) -> int:
        """What each holds beyond its weights; another one is expected to do so, too."""
        here = self._here()
        return max(0, self._held_bytes - sum(model.nbytes for model in here)) // max(1, len(here))

    @property
    def budget_bytes(self) -> int:
        """What all may hold together now: less than they were given where the host is short of memory."""
        return max(0, min(self._budget_bytes, self.all_bytes + self._left_bytes - _KEPT_FREE_BYTES))


class ModelPool:
    """The models of one engine. `models`, `refused`, `of`, `find`, `check`, `add`, `look`, `retire`, `reconfigure` and
    `statistics` are for any thread, the rest is the compute thread's."""

    def __init__(
        self,
        models: Sequence[Model] = (),
        *,
        budget_bytes: int,
        host_lora_bytes: int = 0,
        clock: Callable[[], float],
        wake: Callable[[], None],
        open_models: Callable[[], Collection[str]],
        memory: MemoryReader,
    ) -> None:
        """Take the models, the first is what requests without a model mean. `wake` is called when one was loaded or
        retired; `open_models` returns those of all requests that have not ended; `memory` says what they hold.
        `host_lora_bytes`: what the LoRAs of all share once one was added."""
        self.encoders = SharedEncoders()
        """The text encoders of all models."""
        self._models = {model.name: model for model in models}
        self._folder: FolderOfModels | None = None
        self._make: Callable[[str, Path], Model] | None = None
        self._left_out: dict[str, str] = {}
        self._seen: Mapping[str, tuple[str, str | None]] = {}
        """The stamps of what is in the folder of models, and why it is not served."""
        self._looked = (0, -math.inf)
        self._looking = threading.Lock()
        self._host_lora_bytes = host_lora_bytes
        self._changing = threading.Lock()
        self._budget_bytes = budget_bytes
        self._holdings = _Holdings(memory, budget_bytes=budget_bytes, here=lambda: self._here)
        self._measured_s = -math.inf
        self._clock = clock
        self._wake = wake
        self._open_models = open_models
        self._arrived: deque[tuple[Model, Stepper | EngineError, float]] = deque()
        self._switch: Switch | None = None
        self._is_loading = False
        self._loads = 0
        self._gives_way_s = 0.0
        """When what leaves has to be gone, whatever it has begun."""

    @property
    def models(self) -> Mapping[str, Model]:
        """All models that take requests, resident or not; it does not change any more once it was returned."""
        return MappingProxyType({name: model for name, model in self._models.items() if not model.is_retired})

    @property
    def refused(self) -> Mapping[str, str]:
        """Why models are not served, by name; `another NAME` is not, though one of that name is."""
        models = self.models
        in_folder = {name: why for name, (_, why) in self._seen.items() if why is not None}
        return {**self._left_out, **{f"another {it}" if it in models else it: why for it, why in in_folder.items()}}

    @property
    def prepared(self) -> frozenset[str]:
        """What runs on prepared programs now: "unet", "vae" and names of ControlNets that are in this process."""
        return frozenset[str]().union(*(model.family.prepared for model in self.models.values()))

    @property
    def first(self) -> Model:
        """What requests without a model mean."""
        return next(iter(self._models.values()))

    def of(self, name: str) -> Model:
        """Return the model of that name, also one that was retired while it has open requests."""
        return self._models[name]

    def find(self, name: str) -> Model | None:
        """Return the model of that name, or None if none takes requests. It may be new in the folder of models."""
        found = self._taking(name)
        if found is None and self._folder is not None:
            self.look()
            found = self._taking(name)
        return found

    def _taking(self, name: str) -> Model | None:
        model = self._models.get(name)
        return None if model is None or model.is_retired else model

    def may_add(self, name: str) -> bool:
        """Return whether there is no model of that name, nor anything left of one that was retired."""
        old, switch = self._models.get(name), self._switch
        if old is None:
            return True
        is_gone = old.stepper is None and (switch is None or switch.load != name) and name not in self._open_models()
        return old.is_retired and is_gone

    def add(self, model: Model) -> None:
        """Serve one more model; nothing is loaded yet. Raises `ModelError` if its folder has another name already."""
        folder = model.family.folder
        for name, other in self.models.items():
            if other.family.folder.exists() and other.family.folder.samefile(folder):
                raise ModelError(f"{folder} is {name}'s folder; another name for it belongs into images.aliases")
        with self._changing:
            old = self._models.get(model.name)
            self._models = {**self._models, model.name: model}  # others read the old one meanwhile
        if old is not None:
            old.close()
        self.reconfigure(self._host_lora_bytes)

    def refuse(self, name: str, reason: str) -> None:
        """Say that a model of the configuration is not served."""
        self._left_out[name] = reason
        _log.error("%s is not served: %s", name, reason)

    def reconfigure(self, host_lora_bytes: int) -> None:
        """Set what the LoRAs of all models may take of the host's memory; those of equal shapes share it."""
        self._host_lora_bytes, loras = host_lora_bytes, self.loras
        for each in loras:
            each.reconfigure(host_bytes=host_lora_bytes // len(loras))

    @property
    def loras(self) -> list[LoraCache]:
        """What models have their LoRAs from; those of equal shapes share it."""
        return list({id(model.loras): model.loras for model in self.models.values()}.values())

    def close(self) -> None:
        """Release what models hold beside their weights. Idempotent."""
        for model in self.models.values():
            model.close()
        for loras in self.loras:
            loras.close()

    # ---- the folder of models ------------------------------------------------------------------------------------

    def watch(self, folder: FolderOfModels, make: Callable[[str, Path], Model]) -> None:
        """Serve what is in a folder, too, as it comes and goes. `make` reads a model there, without its weights; it
        raises `ModelError`.

        Every replica looks for itself, when it is asked what there is and when a request names a model that it does not
        know: so all of them serve what is in the folder, also those that start later.
        """
        self._make, self._folder = make, folder
        self.look()

    def look(self, *, always: bool = True) -> None:
        """Take in what came into the folder, and give up what left it. `always` False: unless nothing was moved since
        somebody did; files that change in their place are then seen within `_PERIOD_S`."""
        folder = self._folder
        if folder is None:
            return
        with self._looking:
            now, looked = (folder.changed_ns(), time.monotonic()), self._looked
            if not always and now[0] == looked[0] and now[1] < looked[1] + _PERIOD_S:
                return
            found = folder.list()
            stamps = {name: each.stamp for name, each in found.items()}
            gone = [name for name, (stamp, _) in self._seen.items() if stamps.get(name) != stamp]
            for name in gone:
                if self._seen[name][1] is None:
                    _log.info("%s has left the folder of models, or was replaced: what it accepted is finished", name)
                    self.retire(name)
            self._seen = {name: seen for name, seen in self._seen.items() if name not in gone}
            for name in [name for name in found if name not in self._seen]:
                self._take_from_folder(name, found[name])
            self._looked = now

    def _take_from_folder(self, name: str, found: FoundModel) -> None:
        assert self._make is not None
        try:
            if self._taking(name) is not None:
                raise ModelError(f"{found.folder}: the configuration has another model of that name")
            if not self.may_add(name):
                return  # requests of the one that it replaces are in work: at the next look
            self.add(self._make(name, found.folder))
        except ModelError as error:
            self._seen = {**self._seen, name: (found.stamp, error.message)}
            _log.error("%s is not served: %s", name, error.message)
            return
        self._seen = {**self._seen, name: (found.stamp, None)}
        _log.info("%s is served from now on: %s", name, found.folder)

    # ---- memory --------------------------------------------------------------------------------------------------

    def retire(self, name: str) -> None:
        """Give no more requests to a model. What was accepted is finished; then its weights leave."""
        self._models[name].is_retired = True
        self._wake()

    def check(self, model: Model) -> None:
        """Raise `ModelError` for a model that no switch could make room for."""
        if model.stepper is None and model.nbytes > self._budget_bytes:
            raise ModelError(
                f"{model.name} needs {gigabytes(model.nbytes)}; the models of a replica may take "
                f"{gigabytes(self._budget_bytes)} (images.memory_bytes)"
            )

    def rest(self, model: Model, *, asleep: bool) -> None:
        """Let a model's weights leave once no request for it is open, until the next one; or bring them into memory as
        if one had arrived."""
        model.goes_to_sleep = asleep
        model.woken_s = None if asleep or model.stepper is not None else self._clock()

    def may_run(self, job: ImageJob) -> bool:
        """Return whether the next step could be one of this job."""
        model = self._models[job.request.model]
        return model.stepper is not None and (not model.leaves or job.has_begun)

    def share_loras(self, jobs: Sequence[ImageJob]) -> None:
        """Give back the LoRA sets that others wait for, once their tenant has made a step with what it got back: or
        its requests would never end."""
        with_loras = [job for job in jobs if job.loras is not None]
        calls = Counter[str]()
        for job in with_loras:
            calls[job.request.tenant.name] += sum(unit.step for unit in job.units)
        for loras in {self._models[job.request.model].loras for job in with_loras}:
            loras.update_turns()
        for job in with_loras:
            made = calls[job.request.tenant.name]
            if made != job.given_back_at or not self.may_run(job):
                job.give_back_loras(made, self._wake)

    def stepped(self, batch: Sequence[ImageJob], waiting: Sequence[ImageJob], seconds: float) -> None:
        """Record what a step took, and which models it overtook."""
        latest_s = max(job.spent.accepted_at_s for job in batch)
        self._models[batch[0].request.model].used_s = self._clock()
        if len(self._models) == 1:
            return
        for name, oldest_s in _oldest(waiting).items():
            model = self._models[name]
            if model.stepper is None and latest_s > oldest_s:
                model.overtaken_s += seconds

    def tend(self, jobs: Sequence[ImageJob]) -> Mapping[str, EngineError]:
        """Take in what was loaded, and switch if that is due; return why models could not be loaded, by name."""
        failed = self._take_in()
        self._drop_unwanted()
        self._look(jobs)
        if len(self._models) == 1 and (self.first.stepper is not None or not (jobs or self._woken)):
            return failed
        if self._switch is None:
            self._begin([job for job in jobs if job.request.model not in failed])
        if self._switch is not None and not self._is_loading and self._have_left(jobs, self._switch):
            self._load(self._switch)
        return failed

    def statistics(self) -> ResidencyStatistics:
        """Return a snapshot."""
        return ResidencyStatistics(
            resident=tuple(model.name for model in self._here),
            nbytes=self._holdings.all_bytes,
            budget_bytes=self._holdings.budget_bytes,
            loads=self._loads,
            load_s={name: it.loaded_in_s for name, it in self._models.items() if it.loaded_in_s is not None},
        )

    @property
    def rest_s(self) -> float | None:
        """How long nobody needs to `tend` while there are no jobs; None: until something happens."""
        return _LOOK_S if len(self._here) > 1 else None

    def room_bytes(self) -> int:
        """Return what more models with requests may hold: what is free, and what those without hold."""
        open_models, beyond_bytes = self._open_models(), self._holdings.beyond_bytes
        in_use = [model.nbytes + beyond_bytes for model in self._here if model.name in open_models]
        return self._holdings.budget_bytes - sum(in_use)

    def load_first(self) -> None:
        """Load the first model, before the compute thread starts. Raises `ModelError`."""
        model = self.first
        self.check(model)
        self._holdings.begin()  # what is known of all models without their weights counts for none of them
        started_s = self._clock()
        model.stepper = model.load()
        model.loaded_in_s = self._clock() - started_s

    @property
    def _here(self) -> list[Model]:
        return [model for model in self._models.values() if model.stepper is not None]

    @property
    def _woken(self) -> list[str]:
        return [model.name for model in self._models.values() if model.woken_s is not None]

    def _look(self, jobs: Sequence[ImageJob]) -> None:
        """Measure if it is time; if the models hold too much, also after what was freed was given back, text encoders
        make room, or else the model without work that is worth least."""
        now_s = self._clock()
        if now_s < self._measured_s + _LOOK_S:
            return
        self._measured_s = now_s
        self._holdings.look()
        if self._surplus(jobs) is None and not self._encoders_are_surplus:
            return
        self._holdings.give_back()
        if self._encoders_are_surplus:
            self._encoders_leave()
        elif (name := self._surplus(jobs)) is not None:
            self._let_go(self._models[name], ())

    @property
    def _encoders_are_here(self) -> bool:
        """Whether text encoders are in memory that can leave."""
        return any(model.least_nbytes < model.nbytes for model in self._here)

    @property
    def _encoders_are_surplus(self) -> bool:
        """Whether they are part of too much."""
        return self._encoders_are_here and self._holdings.all_bytes > self._holdings.budget_bytes

    def _encoders_leave(self) -> None:
        self.encoders.leave()
        self._holdings.give_back()
        _log.info("text encoders make room; each comes back for the next text that is not remembered")

    def _surplus(self, jobs: Sequence[ImageJob]) -> str | None:
        demands, budget_bytes = self._demands(jobs)
        in_use = {*self._open_models(), *self._woken}
        return surplus(demands, in_use=in_use, budget_bytes=budget_bytes, now_s=self._clock())

    def _take_in(self) -> dict[str, EngineError]:
        failed: dict[str, EngineError] = {}
        while self._arrived:
            model, found, seconds = self._arrived.popleft()
            self._switch, self._is_loading = None, False
            model.overtaken_s, model.woken_s = 0.0, None
            if isinstance(found, EngineError):
                _log.error("%s could not be loaded: %s", model.name, found.message)
                failed[model.name] = found
                continue
            model.stepper = found
            model.used_s, model.loaded_in_s = self._clock(), seconds
            self._loads += 1
            _log.info("%s is resident after %.2f s", model.name, seconds)
        return failed

    def _drop_unwanted(self) -> None:
        unwanted = [model for model in self._models.values() if model.is_retired or model.goes_to_sleep]
        open_models = self._open_models() if unwanted else ()
        for model in unwanted:
            if model.is_retired:
                model.woken_s = None
            if model.name not in open_models:
                model.goes_to_sleep = False
                if model.stepper is not None:
                    self._let_go(model, (), why="has left" if model.is_retired else "sleeps")
                if model.is_retired:
                    self._forget(model)

    def _forget(self, model: Model) -> None:
        """Remove a model that has left for good, unless it is part of a switch; then once that is done."""
        name, switch = model.name, self._switch
        if switch is not None and name in (switch.load, *switch.leave):
            return
        with self._changing:
            self._models = {other: each for other, each in self._models.items() if each is not model}
        model.close()

    def _begin(self, jobs: Sequence[ImageJob]) -> None:
        """Begin the switch that is due, if any: text encoders leave where fewer models then have to."""
        if not self._woken and all(self._models[job.request.model].stepper is not None for job in jobs):
            return
        found, without = (
            next_switch(demands, budget_bytes=budget_bytes, now_s=self._clock())
            for demands, budget_bytes in (self._demands(jobs), self._demands(jobs, left=True))
        )
        if without is not None and (found is None or len(without.leave) < len(found.leave)):
            self._encoders_leave()
            found = without
        if found is not None:
            for name in found.leave:
                self._models[name].leaves = True
            self._gives_way_s = self._clock() + _DRAIN_SHARE * self._models[found.load].load_s
        self._switch = found

    def _demands(self, jobs: Sequence[ImageJob], *, left: bool = False) -> tuple[list[ModelDemand], int]:
        """Return what is asked of each model, and the budget. No absent one is expected to hold more than that: with
        none beside it each is tried. `left`: as if text encoders had left that can; those of residents come back for a
        text one at a time, so there must be room for the largest, also when all really have."""
        oldest, now_s, here = _oldest(jobs), self._clock(), self._here
        beyond_bytes, budget_bytes = self._holdings.beyond_bytes, self._holdings.budget_bytes
        sizes = {name: model.nbytes + beyond_bytes for name, model in self._models.items()}
        if left or not self._encoders_are_here:
            room_bytes = max((model.family.visiting_bytes for model in here), default=0)
            budget_bytes = max(0, budget_bytes - room_bytes)
            for name, model in self._models.items():
                more_bytes = 0 if model in here else max(0, model.family.visiting_bytes - room_bytes)
                sizes[name] = model.least_nbytes + more_bytes + beyond_bytes
        short: set[str] = set()
        for job in jobs:
            model = self._models[job.request.model]
            need_s = job.left_s + (model.load_s if model.stepper is None else 0.0)
            if job.deadline_at_s is not None and job.deadline_at_s - now_s < 2 * need_s:
                short.add(model.name)
        demands = [
            ModelDemand(
                name=name,
                nbytes=sizes[name] if model in here else min(sizes[name], budget_bytes),
                load_s=model.load_s,
                is_resident=model.stepper is not None,
                oldest_s=oldest.get(name, model.woken_s),
                overtaken_s=model.overtaken_s,
                used_s=model.used_s,
                is_short=name in short,
            )
            for name, model in self._models.items()
        ]
        return demands, budget_bytes

    def _have_left(self, jobs: Sequence[ImageJob], switch: Switch) -> bool:
        """Let go of the models that leave; those whose requests in work end soon go on until then. Return whether all
        are gone."""
        now_s = self._clock()
        for name in switch.leave:
            model = self._models[name]
            begun = [job for job in jobs if job.request.model == name and job.has_begun]
            if model.stepper is None:
                continue
            if not begun or now_s + sum(job.left_s for job in begun) > self._gives_way_s:
                self._let_go(model, begun)
        return all(self._models[name].stepper is None for name in switch.leave)

    def _let_go(self, model: Model, begun: Sequence[ImageJob], *, why: str = "makes room") -> None:
        for job in begun:
            for unit in job.units:
                unit.pause()
        model.leave()
        self._holdings.give_back()
        _log.info("%s %s", model.name, why)

    def _load(self, switch: Switch) -> None:
        model = self._models[switch.load]
        self._is_loading = True

        def load() -> None:
            started_s = self._clock()
            found: Stepper | EngineError
            try:
                found = model.load()
            except EngineError as error:
                found = error
            except Exception as error:
                _log.exception("%s: loading failed", model.name)
                found = ModelError(f"{model.name} could not be loaded: {error}")
            self._arrived.append((model, found, self._clock() - started_s))
            self._wake()

        threading.Thread(target=load, name="plait-load-model", daemon=True).start()


def _oldest(jobs: Sequence[ImageJob]) -> dict[str, float]:
    """Return when the oldest request of each model arrived."""
    found: dict[str, float] = {}
    for job in jobs:
        at_s = job.spent.accepted_at_s
        found[job.request.model] = min(found.get(job.request.model, at_s), at_s)
    return found
