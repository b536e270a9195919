"""The image workloads: which orders, in which sequence. Pure and fixed by seeds; no torch.

A cost is an order's steps, where a step with a ControlNet counts one and a half times (a ControlNet is a second
copy of a UNet's encoder half).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from plait_bench.fleet.values import Item, ItemList, ProcessLayout
from plait_bench.images.sizes import SIZES, ImageSize, LoraSet, Variety

GUIDANCE = 3.0
FEWEST_STEPS, MAX_STEPS = 12, 30
_ARRIVAL_SEED = 20_251

PROMPTS = (
    "red apple", "dog face", "grinning face", "sunflower", "soccer ball", "rocket", "crescent moon", "octopus",
    "birthday cake", "umbrella", "cactus", "sailboat", "owl", "guitar", "snowman", "strawberry",
)  # fmt: skip
LORA_SETS = SIZES["starter"].lora_sets
CONTROLNETS = ("edges", "colors")
SCHEDULERS = ("ddim", "euler", "dpmpp_2m", "unipc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """One image. `control` is a ControlNet's name and the number of its drawing (`drawings.control_map`); `edge` its
    width and height, None for the model's own."""

    prompt: str
    seed: int
    steps: int
    scheduler: str = "ddim"
    guidance: float = GUIDANCE
    loras: tuple[tuple[str, float], ...] = ()
    control: tuple[str, int] | None = None
    edge: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the order as JSON for the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> Self:
        """Parse an order that came over the pipe."""
        loras = tuple((str(name), float(scale)) for name, scale in item["loras"])
        control = item["control"]
        return cls(**{**item, "loras": loras, "control": None if control is None else (control[0], control[1])})


def cost(item: Item) -> float:
    """Return the relative cost of an item: its steps, half as much again with a ControlNet."""
    return float(item["steps"]) * (1.5 if item["control"] else 1.0)


def lora_set(item: Item) -> str:
    """Return a key that orders with equal LoRA sets share."""
    return repr([list(lora) for lora in item["loras"]])


START = "start"
"""The workload that has no orders of this kind: how long a system takes to start (`start.py`)."""

_COUNTS = {"single": 3, "controlnet": 3, "lora": 4, "same4": 4, "same16": 16, "mixed4": 4}
DISTINCT = 16
"""The number of orders of `distinct16`, each with a LoRA set of its own."""

CONCURRENT = frozenset({"same4", "same16", "mixed4", "mixed16", "distinct16"})
"""The workloads whose orders come at the same time; in the others each comes when the one before is done."""


def workloads(names: Sequence[str] | None = None, variety: Variety | None = None) -> tuple[ItemList, ...]:
    """Make all workloads that have orders, or those named. Raises KeyError for a name that the size does not have."""
    variety = variety or Variety()
    size = variety.size
    known = {name: name for name in size.workloads if name != START}
    return tuple(_workload(known[name], variety) for name in (names or known))


def _workload(name: str, variety: Variety) -> ItemList:
    size = variety.size
    steps, warm_up_steps = variety.steps
    orders = [replace(order, edge=variety.image_edge) for order in _orders(name, replace(size, steps=steps))]
    one_by_one = name not in CONCURRENT
    return ItemList(
        name=variety.row_name(name),
        items=tuple(order.to_json() for order in orders),
        warm_up=tuple(replace(order, steps=warm_up_steps).to_json() for order in orders),
        one_by_one=one_by_one,
        trial_items=1 if one_by_one and size.has_edge else 0,
        layouts=_one_process if variety.on_gpu else size.layouts,
        settle_s=0.0 if variety.on_gpu else size.settle_s,
    )


def _one_process(offered: Sequence[ProcessLayout]) -> Sequence[ProcessLayout]:
    """Return the layout of a GPU: one process with all cores."""
    return [max((each for each in offered if each.processes == 1), key=lambda each: each.threads)]


def _orders(name: str, size: ImageSize) -> list[ImageSpec]:
    sets = size.lora_sets
    if name == "mixed16":
        return _mixed16(size)
    if name == "distinct16":
        return [_order(size, i, 300 + i, loras=loras) for i, loras in enumerate(distinct_sets(size.lora_names))]
    count = size.images.get(name) or _COUNTS[name.removesuffix("-service")]
    if name in {"controlnet", "controlnet-service"}:
        return [_order(size, i, i, control=("edges", i)) for i in range(count)]
    if name == "same16":  # sixteen customers of one style
        return [_order(size, i, 100 + i, loras=sets[0]) for i in range(count)]
    if name in {"lora", "mixed4"}:
        return [_order(size, i, i, loras=sets[i % len(sets)]) for i in range(count)]
    return [_order(size, i, i) for i in range(count)]


def _order(size: ImageSize, prompt: int, seed: int, **more: Any) -> ImageSpec:
    return ImageSpec(prompt=PROMPTS[prompt], seed=seed, **{"steps": size.steps, **more})


def distinct_sets(names: Sequence[str]) -> list[LoraSet]:
    """Make `DISTINCT` different LoRA sets of the names: singles, pairs and all of them, at different scales."""
    folded = [tuple(name for bit, name in enumerate(names) if mask >> bit & 1) for mask in range(1, 1 << len(names))]
    return [
        tuple((name, round(0.5 + 0.05 * ((i + 3 * k) % 10), 2)) for k, name in enumerate(folded[i % len(folded)]))
        for i in range(DISTINCT)
    ]


def _mixed16(size: ImageSize) -> list[ImageSpec]:
    """Make 4 LoRA sets x 4 orders: every set has each scheduler once, and one order with each ControlNet."""
    draw = random.Random(_ARRIVAL_SEED)
    orders = []
    for i in range(len(PROMPTS)):
        group, member = divmod(i, 4)
        control = (CONTROLNETS[member], i) if member < len(CONTROLNETS) else None
        steps = draw.randint(FEWEST_STEPS, MAX_STEPS)
        orders.append(
            _order(
                size, i, 200 + i, steps=steps, scheduler=SCHEDULERS[member], loras=size.lora_sets[group],
                control=control,
            )
        )  # fmt: skip
    draw.shuffle(orders)
    return orders
