"""The systems that the image benchmark compares, and which of them take part in which workload. No torch.

`plait` is `plait serve` with its default configuration on the whole host, over HTTP. The other systems of that family
differ in the one setting that their name says; `plait_engine` is the engine in one process, without Serve and HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from plait_bench.fleet.sharing import evenly, in_runs
from plait_bench.fleet.values import Item, ItemList, Json, System
from plait_bench.images.sizes import ImageSize
from plait_bench.images.systems.environment import interpreter
from plait_bench.images.workloads import cost, lora_set

__all__ = ["OURS", "SYSTEMS", "systems", "taking_part"]

OURS = "plait"
_SERVED: Mapping[str, Mapping[str, Json]] = {
    "plait": {},
    "plait_exact": {"knobs": {"exact": "always"}},
    "plait_torch": {"executor": "torch"},
    # A ControlNet as a service: on the cores that the engine uses too, or on one that the engine leaves to it.
    "plait_shared": {"knobs": {"controlnet_placement": "remote"}},
    "plait_own_cores": {"knobs": {"controlnet_placement": "remote"}, "is_split": True},
}
_DIFFUSERS: Mapping[str, str] = {"diffusers_fair": "fair", "diffusers": "stock", "diffusers_batched": "batched"}
_FACTORIES = "plait_bench.images.systems.factories"

SYSTEMS = (*_SERVED, "plait_engine", *_DIFFUSERS, "openvino")
"""All systems, in the order of the table."""

_TORCH = ("plait", "plait_torch", "diffusers_fair", "diffusers")
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "start": ("plait", "diffusers", "openvino"),
    "single": ("plait", "plait_exact", "plait_torch", "diffusers_fair", "diffusers", "openvino"),
    "controlnet": _TORCH,
    "controlnet-service": ("plait", "plait_shared", "plait_own_cores", "diffusers_fair"),
    "lora": _TORCH,
    "same4": ("plait", "plait_torch", "diffusers_fair", "diffusers_batched", "openvino"),
    "same16": (*_TORCH, "diffusers_batched"),
    "mixed4": _TORCH,
    "mixed16": _TORCH,
    "distinct16": _TORCH,
}
_ON_GPU = ("plait_engine", "diffusers_fair", "diffusers")
_WITHOUT_LORAS = ("single", "same4", "start")
_BATCHED = ("same4", "same16")
_CONTROLLED = ("controlnet", "controlnet-service", "mixed16")


def taking_part(workload: str, size: ImageSize, named: Sequence[str] = (), *, on_gpu: bool = False) -> tuple[str, ...]:
    """Return the systems of a workload, ours first: its own, or all that were named and can do it.

    At real size the stock pipeline takes part only where it differs from the fair one. On a GPU it does everywhere, and
    our engine is measured in its own process, like the pipelines.
    """
    if on_gpu:
        return tuple(name for name in _ON_GPU if not named or name in named)
    if named:
        return tuple(name for name in SYSTEMS if name in named and _can(name, workload))
    found = _DEFAULTS[workload]
    if size.has_edge and workload not in {"lora", "start"}:
        found = tuple(name for name in found if name != "diffusers")
    return tuple(name for name in SYSTEMS if name in found)


def _can(system: str, workload: str) -> bool:
    if workload == "start":
        return system in _DEFAULTS["start"] or system in _SERVED
    if system == "openvino":  # its pipelines have no ControlNet, and a LoRA needs an export of its own
        return workload in _WITHOUT_LORAS
    if system == "diffusers_batched":
        return workload in _BATCHED
    if system in {"plait_shared", "plait_own_cores"}:
        return workload in _CONTROLLED
    return True


def systems(names: Sequence[str]) -> tuple[System, ...]:
    """Make the systems of those names."""
    return tuple(_system(name) for name in names)


def _system(name: str) -> System:
    if name in _SERVED:
        settings = dict(_SERVED[name])
        return System(name=name, factory=f"{_FACTORIES}:served", settings=settings, share=_whole, is_own_layout=True)
    if name == "plait_engine":
        return System(name=name, factory=f"{_FACTORIES}:engine", settings={}, share=_whole, is_own_layout=True)
    if name == "openvino":
        return System(
            name=name, factory=f"{_FACTORIES}:openvino", settings={}, share=partial(evenly, cost=cost),
            variants=_calls, interpreter=interpreter,
        )  # fmt: skip
    way = _DIFFUSERS[name]
    in_groups: Callable[[Sequence[Item], int], list[list[int]]] = partial(in_runs, cost=cost, group=lora_set)
    return System(
        name=name,
        factory=f"{_FACTORIES}:diffusers",
        settings={"way": way},
        share=in_groups if way == "fair" else partial(evenly, cost=cost),
        variants=partial(_formats, way),
    )


def _formats(way: str, workload: ItemList) -> tuple[str, ...]:
    """Return the forms of a pipeline worth a trial: on a GPU the stock one as it is, the others compiled, too."""
    if workload.settings.get("device") != "cuda":
        return ("", "channels_last")
    return ("",) if way == "stock" else ("channels_last", "compiled")


def _calls(workload: ItemList) -> tuple[str, ...]:
    """Return whether each image is a call of its own, or all are one batch where they agree."""
    return ("",) if workload.one_by_one else ("", "batched")


def _whole(items: Sequence[Item], processes: int) -> list[list[int]]:
    return [list(range(len(items))), *[[] for _ in range(processes - 1)]]
