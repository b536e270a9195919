"""What of a GPU each replica gets: `num_gpus` where plait.yaml leaves it out, fitted to the GPUs that there are.

Ray hands a GPU to whoever asks for a part of one, in whatever order replicas come, and a replica that asks for too much
waits for ever. So shares are such that every order works out, since Ray takes the fullest device with room (`k`: an
integer):

- a GPU for each replica, if there are as many;
- on one GPU, parts in proportion to what a replica holds;
- on several, a whole one for each replica of the largest deployments, and 1/k for all others.

What a replica holds is its weights in two bytes each, and as much again to work with, beside what CUDA takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from plait.config import PlaitConfig, ServedConfig
from plait.deployments import Deployment
from plait.errors import PlaitError, told
from plait_deploy.errors import PlacementError
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, task_of
from plait_serving.deployments import CONTROLNET_PREFIX, ENGINE, ray_internals, worker_name
from plait_serving.diffusion.errors import LoraError
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.sources.file_kinds import SUFFIX
from plait_serving.diffusion.weight_files import MAX_FILE_BYTES
from plait_serving.ranking.config import HnSection

ConfigT = TypeVar("ConfigT", bound=ServedConfig)

_PROCESS_BYTES = 600_000_000
"""CUDA's context and its libraries, of each process."""
_UNKNOWN_BYTES = 7_000_000_000
"""The weights of a base model that is not on this machine: those of SDXL."""
_DENSE, _DENSE_BYTES = "constants.safetensors", 500_000_000
"""Where the weights of a ranking model's dense half are, and what they are taken for if they are elsewhere; its tables
stay with the CPU."""
_ADVICE = "; set num_gpus: 0 for what a CPU can do, run fewer replicas, or give each its part by num_gpus"
_GIGABYTES = {
    "P4": 8, "K80": 12, "P100": 16, "T4": 16, "V100": 32, "A10G": 24, "L4": 24, "L40S": 48, "A100": 80, "H20": 141,
    "H100": 96, "H200": 141, "B200": 192, "B300": 288,
}  # fmt: skip
"""The most memory that cards have which Ray calls so; what it calls otherwise is not judged by its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """A deployment that can use a GPU. `path`: of its section; `given`: its `num_gpus`, None if it is left out."""

    name: str
    path: tuple[str, ...]
    replicas: int
    given: float | None
    weights_bytes: int

    @property
    def least_bytes(self) -> int:
        return self.weights_bytes + _PROCESS_BYTES

    @property
    def need_bytes(self) -> int:
        return 2 * self.weights_bytes + _PROCESS_BYTES


@told(PlacementError)
def with_gpus(config: ConfigT, cluster: ClusterState | None) -> ConfigT:
    """Return the configuration with `num_gpus` of all that can use a GPU of `cluster`, whose devices are then taken; as
    it is where there is no GPU, or nothing is known of it (None). Raises `PlaitError`, with the numbers, for what does
    not fit."""
    if cluster is None:
        return config
    wishes, total = list(_wishes(config)), int(cluster.gpus.sum())
    asked = [each for each in wishes if each.given]
    for each in sorted(asked, key=lambda it: -(it.given or 0)):
        task = task_of(each.name, num_cpus=0, num_gpus=each.given or 0)
        for _ in range(each.replicas):
            if (at := cluster.first_fit(task)) is None:
                said = ", ".join(f"{it.name} {it.replicas} x {it.given:g}" for it in asked)
                raise PlaitError(f"there are {total} GPUs, and num_gpus asks for more: {said}{_ADVICE}")
            cluster.place(task, at)
    unset = [each for each in wishes if each.given is None]
    if not total or not unset:
        return config
    found = _fitted(unset, whole=int(cluster.whole.sum()), widest=int(cluster.widest.max()))
    capacity = max(_GIGABYTES.get(model, math.inf) for model in cluster.models) * 1e9
    if not found or any(each.least_bytes > found[each.name] * capacity for each in unset):
        said = ", ".join(f"{it.name} {it.replicas} x {it.least_bytes / 1e9:.1f} GB" for it in unset)
        kind = f" of {capacity / 1e9:g} GB" if capacity < math.inf else ""
        free = f", {len(asked)} deployments have taken theirs" if asked else ""
        raise PlaitError(f"there are {total} GPUs{kind}{free}, and what can use one does not fit: {said}{_ADVICE}")
    for each in wishes:
        config = _written(config, (*each.path, "num_gpus"), found.get(each.name, each.given))
    return config


def _fitted(wishes: Sequence[_Wish], *, whole: int, widest: int) -> Mapping[str, float]:
    """Return the shares of one replica of each; none if no GPU has room. `whole`: GPUs that are free; `widest`:
    milli-GPUs that the freest one has."""
    if sum(each.replicas for each in wishes) <= whole:
        return {each.name: 1.0 for each in wishes}
    if whole <= 1:
        return _on_one(wishes, widest) if widest else {}
    largest = sorted(wishes, key=lambda it: -it.need_bytes)
    ways = []
    for alone in range(len(largest)):
        rest, left = largest[alone:], whole - sum(each.replicas for each in largest[:alone])
        if left == 1:
            shared = _on_one(rest, WHOLE)
        elif left > 1:
            each_way = math.ceil(sum(each.replicas for each in rest) / left)
            shared = {each.name: _floor(1 / each_way) for each in rest}
        else:
            break
        ways.append({each.name: 1.0 for each in largest[:alone]} | shared)
    return max(ways, key=lambda way: min(way[each.name] / each.need_bytes for each in wishes))


def _on_one(wishes: Sequence[_Wish], milli: int) -> dict[str, float]:
    total = sum(each.replicas * each.need_bytes for each in wishes)
    return {each.name: _floor(milli / WHOLE * each.need_bytes / total) for each in wishes}


def _floor(share: float) -> float:
    """Return a share in whole milli-GPUs: sums of rounded ones may be more than there is."""
    return math.floor(share * WHOLE) / WHOLE


def _wishes(config: ServedConfig) -> Iterator[_Wish]:
    """The starter's ControlNets and recommenders are small, and no section of a file has room for a share of theirs:
    they stay on a CPU."""
    if (images := config.images) is not None and images.device != "cpu":
        by_hand = 0.0 if ":" in images.device else None  # whoever numbers a device has chosen it
        largest = max(_half_bytes(Path(it.folder)) for it in images.base_models.values())
        yield _wish(ENGINE, ("images",), images, images.memory_bytes or largest, by_hand)
        for name, net in images.controlnet_services().items() if images.controlnets is not None else ():
            path = ("images", "controlnets", name)
            yield _wish(CONTROLNET_PREFIX + name, path, net, _half_bytes(net.folder), by_hand)
    for name, model in ({} if config.recommend is None else config.recommend.models or {}).items():
        for role, part in model.parts.items():
            if isinstance(part, HnSection):
                dense = _half_bytes(model.folder / _DENSE, unknown=_DENSE_BYTES)
                yield _wish(worker_name(name, role), ("recommend", "models", name, role), part, dense, None)


def _wish(name: str, path: tuple[str, ...], section: Any, weights_bytes: int, unset: float | None) -> _Wish:
    given = unset if section.num_gpus is None else section.num_gpus
    return _Wish(name=name, path=path, replicas=section.max_replicas, given=given, weights_bytes=weights_bytes)


def _half_bytes(model: Path, *, unknown: int = _UNKNOWN_BYTES) -> int:
    """Return a model's weights in two bytes each, as far as its files say; files of another precision are the same
    weights."""
    weights: dict[tuple[Path, str], int] = {}
    for path in [model] if model.is_file() else model.rglob(f"*{SUFFIX}"):
        with suppress(LoraError):  # said where it is loaded
            found = inspect(path, max_bytes=MAX_FILE_BYTES).tensors
            weights |= {(path.parent, name): math.prod(info.shape) for name, info in found.items()}
    return 2 * sum(weights.values()) or unknown


def _written(section: Any, path: Sequence[str], value: Any) -> Any:
    """Return a section, or sections by name, with a value at a path."""
    key, *rest = path
    if isinstance(section, Mapping):
        return {**section, key: _written(section[key], rest, value)}
    return section.model_copy(update={key: _written(getattr(section, key), rest, value) if rest else value})


def running_cluster() -> ClusterState | None:
    """Return the nodes of the Ray that this process is connected to, with those that its autoscaler may add; None
    without a Ray, or without a node."""
    import ray

    from plait_deploy.on_ray.nodes import living_nodes, ray_nodes

    if not ray.is_initialized():
        return None
    nodes = [each.node for each in living_nodes(ray_nodes())]
    added = [_node(name, gpus) for name, gpus, most in ray_internals.node_groups() for _ in range(most)]
    # What the autoscaler has added already is among both.
    more = sum(each.gpus for each in added) > sum(each.gpus for each in nodes)
    return ClusterState([*added, *(each for each in nodes if not each.gpus)] if more else nodes) if nodes else None


def this_machine(num_gpus: int | None) -> ClusterState:
    """Return this machine with so many GPUs; None: those that Ray finds."""
    count, model = ray_internals.gpus_here() if num_gpus is None else (num_gpus, "")
    return ClusterState([_node("here", count, model)])


def pods_with_gpus(config: PlaitConfig) -> ClusterState | None:
    """Return the pods with GPUs that may carry a configuration; None if it asks for none, by `num_gpus` or
    `deploy.gpu`."""
    wishes = list(_wishes(config))
    if "gpu" not in config.deploy.model_fields_set and not any(each.given for each in wishes):
        return None
    group = config.deploy.gpu
    count = group.max_pods or math.ceil(sum(each.replicas * max(1, each.given or 0) for each in wishes))
    # A replica that is larger than a pod is refused where pods are made, by the name of what to change.
    gpus = max(group.gpus, *(math.ceil(each.given or 0) for each in wishes)) if wishes else 0
    return ClusterState([_node(f"pod {number}", gpus) for number in range(count)]) if count else None


def _node(name: str, gpus: int, gpu_model: str = "") -> ClusterNode:
    return ClusterNode(name=name, cpu_milli=0, memory_mib=0, gpus=gpus, gpu_model=gpu_model)


def placement_line(rows: Sequence[Deployment], cluster: ClusterState | None) -> str:
    """Return what runs on GPUs, how many replicas with which part of one each, and what on CPUs."""
    on = [f"{row.name} {row.max_replicas} x {row.num_gpus:g}" for row in rows if row.num_gpus]
    off = f"on CPUs: {', '.join(row.name for row in rows if not row.num_gpus)}"
    if cluster is None or not cluster.total_milli:
        return f"no GPU; {off}" if not on else f"on GPUs: {', '.join(on)}; {off}"
    kinds = ", ".join(filter(None, cluster.models))
    return f"on {int(cluster.gpus.sum())} GPU(s){kinds and f' ({kinds})'}: {', '.join(on) or 'nothing'}; {off}"
