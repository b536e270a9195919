"""The image benchmark: images per second, seconds until the first image, and memory, of plait and of its peers.

`plait` is `plait serve` with its default configuration on the whole host, over HTTP. The other systems of that family
differ in the one setting that their name says; `plait_engine` is the engine in one process, without Serve and HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from plait_bench.benchmark import Say, Workload, cache_folder, chosen, cores
from plait_bench.commands import environment, write_random_model
from plait_bench.errors import BenchError
from plait_bench.images.fleet import ItemList, System
from plait_bench.images.measured import OnFleets, PixelCheck, StartWorkload
from plait_bench.images.orders import (
    START,
    DTypeName,
    ImageSize,
    ImageSpec,
    LoraSet,
    ModelFolder,
    cost,
    size_of,
    workload,
)

LORA_RANK = 16

PINS = (
    "optimum-intel[openvino]==2.2.0",
    "openvino==2026.4.1",
    "diffusers==0.39.0",
    "transformers==5.5.4",
    "pillow",
)


def interpreter() -> Path:
    """Return the Python of the OpenVINO peer's environment, whose libraries need older versions of ours, with torch in
    the very build that is here (a CPU build stays one). Raises `SystemUnavailable`."""
    # torchvision is required by optimum-intel, used by nothing here, and an index may offer a build for another torch.
    pins = (*PINS, f"torch=={version('torch')}")
    return environment(cache_folder() / "openvino", pins, dropped=("torchvision",))


def _formats(way: str, items: ItemList) -> tuple[str, ...]:
    """Return the forms of a pipeline worth a trial: on a GPU the stock one as it is, the others compiled, too; a
    transformer, which has hardly any convolutions, as it is and compiled."""
    if items.settings["is_transformer"]:
        return ("", "compiled")
    if items.settings["device"] != "cuda":
        return ("", "channels_last")
    return ("",) if way == "stock" else ("channels_last", "compiled")


def evenly(orders: Sequence[ImageSpec], processes: int) -> list[list[int]]:
    """Assign the dearest order first to the least loaded process; each share is in arrival order.

    For systems that gain nothing from order. At most 4/3 of the best possible makespan (Graham 1969).
    """
    costs = list(map(cost, orders))
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0.0] * processes
    for i in sorted(range(len(orders)), key=lambda i: (-costs[i], i)):
        lightest = loads.index(min(loads))
        shares[lightest].append(i)
        loads[lightest] += costs[i]
    return [sorted(share) for share in shares]


def in_runs(orders: Sequence[ImageSpec], processes: int) -> list[list[int]]:
    """Sort by LoRA set (in order of first arrival) and cut where each process has an even part of the cost.

    For systems that pay for a change of set: a cut adds at most one change, and shares stay even.
    """
    members: dict[LoraSet, list[int]] = {}
    for i, order in enumerate(orders):
        members.setdefault(order.loras, []).append(i)
    total = sum(map(cost, orders))
    shares: list[list[int]] = [[] for _ in range(processes)]
    done = 0.0
    for i in (i for of in members.values() for i in of):
        middle = done + cost(orders[i]) / 2
        shares[min(processes - 1, int(processes * middle / total))].append(i)
        done += cost(orders[i])
    return shares


def _ours(name: str, worker: str = "Served", **settings: Any) -> System:
    factory = f"plait_bench.images.ours:{worker}"
    return System(name=name, factory=factory, settings=settings, share=evenly, is_own_layout=True)


def _diffusers(name: str, way: str, share: Callable[..., list[list[int]]] = evenly) -> System:
    return System(
        name=name, factory="plait_bench.images.peers:Diffusers", share=share, settings={"way": way},
        variants=partial(_formats, way),
    )  # fmt: skip


SYSTEMS: Mapping[str, System] = {
    system.name: system
    for system in (
        _ours("plait"),
        _ours("plait_exact", knobs={"exact": "always"}),
        _ours("plait_torch", executor="torch"),
        _ours("plait_shared", knobs={"controlnet_placement": "remote"}),  # a ControlNet as a service
        _ours("plait_engine", "InProcessEngine"),
        _diffusers("diffusers_fair", "fair", in_runs),
        _diffusers("diffusers", "stock"),
        _diffusers("diffusers_batched", "batched"),
        System(
            name="openvino", factory="plait_bench.images.peers:OpenVino", share=evenly,
            variants=lambda items: ("",) if items.one_by_one else ("", "batched"), interpreter=interpreter,
        ),
    )
}  # fmt: skip

_TORCH = ("plait", "plait_torch", "diffusers_fair", "diffusers")
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    START: ("plait", "diffusers", "openvino"),
    "single": ("plait", "plait_exact", "plait_torch", "diffusers_fair", "diffusers", "openvino"),
    "controlnet": _TORCH,
    "controlnet-service": ("plait", "plait_shared", "diffusers_fair"),
    "lora": _TORCH,
    "same4": ("plait", "plait_torch", "diffusers_fair", "diffusers_batched", "openvino"),
    "same16": (*_TORCH, "diffusers_batched"),
    "mixed4": _TORCH,
    "mixed16": _TORCH,
    "distinct16": _TORCH,
}
_WITHOUT_START = {"plait_engine", "diffusers_fair", "diffusers_batched"}
_ONLY: Mapping[str, tuple[str, ...]] = {
    "openvino": (START, "single", "same4"),  # its pipelines have no ControlNet, and a LoRA needs an export of its own
    "diffusers_batched": ("same4", "same16"),
    "plait_shared": (START, "controlnet", "controlnet-service", "mixed16"),
}

_OF_TRANSFORMERS = frozenset(("plait", "plait_engine", "diffusers_fair", "diffusers", "diffusers_batched"))
"""Those that differ there, and can run one."""

_ON_GPU = ("plait_engine", "diffusers_fair", "diffusers")


def benchmark(
    *,
    only: Sequence[str] = (),
    models: Path | None = None,
    size: str = "starter",
    edge: int | None = None,
    dtype: str = "auto",
    device: Literal["cpu", "cuda"] = "cpu",
    systems: Sequence[str] = (),
) -> tuple[Workload, ...]:
    """Make the benchmark over the models in `models` (None: the starter's, or those in the cache), with all workloads
    and their systems or those named. `edge` None: the size's own. `dtype` "auto": each that the CPU computes in (of a
    transformer only the narrowest), float16 on a GPU.

    The models of a real size that are missing are written first. Raises `BenchError` if models are missing, or a name
    is unknown.
    """
    kind = size_of(size).for_gpu() if device == "cuda" else size_of(size)
    root = models or (cache_folder() / kind.name if kind.family else _starter())
    names = chosen(only, kind.workloads, "workload")
    chosen(systems, tuple(SYSTEMS), "system")
    measured = dtypes(dtype, device)[-1:] if kind.is_transformer else dtypes(dtype, device)
    sizes = [kind.of(each, edge) for each in measured]
    needed = ModelFolder.of(root, kind, [item for name in names for item in workload(name, sizes[0]).items])
    if not kind.family and (absent := needed.missing()):
        raise BenchError(f"{root} lacks {', '.join(str(path.relative_to(root)) for path in absent)}")
    write = partial(write_missing, needed, kind)
    fleets = on_fleets(root, sizes, [name for name in names if name != START], systems, prepare=write)
    starts = []
    for each in sizes if START in names else ():
        items = workload(START, each).items
        settings = _settings(root, each, items)
        known = [SYSTEMS[name].given(settings) for name in taking_part(START, each, systems)]
        starts.append(StartWorkload(each.row_name(START), known, items[0], prepare=write))
    return (*starts, *fleets)


def on_fleets(
    root: Path,
    sizes: Sequence[ImageSize],
    names: Sequence[str],
    systems: Sequence[str] = (),
    *,
    host_cores: int = 0,
    **given: Any,
) -> list[OnFleets]:
    """Make the workloads that have orders, on the whole host or so many cores. `given`: as `OnFleets` has it."""
    check, made = PixelCheck(), list[OnFleets]()
    given |= {"cores": host_cores or cores(), "takes_turns": sizes[0].max_open == 1}
    for name, size in [(name, size) for size in sizes for name in names]:
        items = workload(name, size)
        items = replace(items, settings=_settings(root, size, items.items))
        parts = _parts(taking_part(name, size, systems), size)
        made += [OnFleets(items, [SYSTEMS[each] for each in part], check, **given) for part in parts]
    return made


def _parts(names: Sequence[str], size: ImageSize) -> list[Sequence[str]]:
    """Return the systems of a workload; where not all fit in memory, each peer beside ours: two would otherwise be
    started anew for every round."""
    if size.max_open < 2 or len(names) <= size.max_open:
        return [names] if names else []
    ours, *others = names
    peers = sorted(others, key=lambda name: (not name.startswith("diffusers"), others.index(name)))  # the reference
    return [(ours, peer) for peer in peers]


def _settings(root: Path, size: ImageSize, orders: Sequence[ImageSpec]) -> dict[str, Any]:
    """Return what the systems are built with: the models that the orders need, and how to run them."""
    return {
        "models": ModelFolder.of(root, size, orders),
        "dtype": size.dtype,
        "edge": size.image_edge,
        "device": "cuda" if size.on_gpu else "cpu",
        "is_transformer": size.is_transformer,
    }


def dtypes(asked: str, device: str = "cpu") -> tuple[DTypeName, ...]:
    """Return the dtypes to measure: those that the CPU computes in, or the one that was asked for if it does; on a GPU
    float16, the default there. Raises `BenchError`."""
    from plait_kernels.cores import has_bfloat16

    native: tuple[DTypeName, ...] = ("float32", "bfloat16") if has_bfloat16() else ("float32",)
    if device == "cuda":
        native = ("float16",) if asked == "auto" else ("float32", "bfloat16", "float16")
    found = tuple(dtype for dtype in native if asked in ("auto", dtype))
    if not found:
        raise BenchError(f"this machine does not compute in {asked}: emulated, it would say nothing")
    return found


def taking_part(name: str, size: ImageSize, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the systems of a workload, ours first: its own, or all that were named and can do it.

    At real size the stock pipeline takes part only where it differs from the fair one. On a GPU it does everywhere, and
    our engine is measured in its own process, like the pipelines.
    """
    if size.on_gpu:
        return tuple(system for system in _ON_GPU if not named or system in named)
    if named:
        able = {system for system in named if name in _ONLY.get(system, (name,))}
        return tuple(system for system in SYSTEMS if system in able - (_WITHOUT_START if name == START else set()))
    found = tuple(system for system in _DEFAULTS[name] if not size.is_transformer or system in _OF_TRANSFORMERS)
    if size.family and name not in {"lora", START}:
        found = tuple(system for system in found if system != "diffusers")
    return tuple(system for system in SYSTEMS if system in found)


def write_missing(folder: ModelFolder, size: ImageSize, say: Say) -> None:
    """Write the models of a size that are missing, with random weights. Raises `BenchError`."""
    for absent in folder.missing():
        path = absent if absent.suffix == ".safetensors" else absent.parent
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in folder.controlnets.values():
            command = [f"{size.family}-controlnet"]
        elif path == folder.base:
            command = [size.family, *size.words]
        else:
            seed = 1 + list(folder.loras.values()).index(path)
            command = [size.family, "--lora", "peft", "--rank", str(LORA_RANK), "--seed", str(seed)]
        say(f"writing {path} (once)")
        write_random_model(path, *command)


def _starter() -> Path:
    """Return the folder of the models that ship with plait."""
    from plait_serving.images.config import STARTER_FOLDER

    return STARTER_FOLDER
