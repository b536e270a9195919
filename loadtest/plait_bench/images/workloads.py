"""The image workloads: which orders, in which sequence. Pure and fixed by seeds; no torch.

A cost is an order's steps, where a step with a ControlNet counts one and a half times (a ControlNet is a second
copy of a UNet's encoder half).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from plait_bench.fleet.values import Item, ItemList

STEPS = 20
GUIDANCE = 3.0
FEWEST_STEPS, MAX_STEPS = 12, 30
# Solvers of second order need three steps to use every one of their formulas.
_WARM_UP_STEPS = 3
_ARRIVAL_SEED = 20_251

PROMPTS = (
    "red apple", "dog face", "grinning face", "sunflower", "soccer ball", "rocket", "crescent moon", "octopus",
    "birthday cake", "umbrella", "cactus", "sailboat", "owl", "guitar", "snowman", "strawberry",
)  # fmt: skip
LORA_SETS: tuple[tuple[tuple[str, float], ...], ...] = (
    (("noto", 1.0),),
    (("sketch", 1.0),),
    (("pixel", 0.8),),
    (("noto", 0.6), ("pixel", 0.5)),
)
CONTROLNETS = ("edges", "colors")
SCHEDULERS = ("ddim", "euler", "dpmpp_2m", "unipc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """One image. `control` is a ControlNet's name and the number of its drawing (`drawings.control_map`)."""

    prompt: str
    seed: int
    steps: int = STEPS
    scheduler: str = "ddim"
    guidance: float = GUIDANCE
    loras: tuple[tuple[str, float], ...] = ()
    control: tuple[str, int] | None = None

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


NAMES = ("single", "controlnet", "lora", "same16", "mixed16")
"""The names of the workloads, in the order of the table."""


def workloads(names: Sequence[str] | None = None) -> tuple[ItemList, ...]:
    """Make all workloads, or those named. Raises KeyError for an unknown name."""
    known = {workload.name: workload for workload in _all()}
    return tuple(known[name] for name in (names or NAMES))


def _all() -> list[ItemList]:
    same16 = _workload("same16", _same16(), one_by_one=False)
    return [
        _workload("single", [ImageSpec(prompt=PROMPTS[i], seed=i) for i in range(3)]),
        _workload("controlnet", [ImageSpec(prompt=PROMPTS[i], seed=i, control=("edges", i)) for i in range(3)]),
        _workload("lora", [ImageSpec(prompt=PROMPTS[i], seed=i, loras=LORA_SETS[i]) for i in range(len(LORA_SETS))]),
        same16,
        _workload("mixed16", _mixed16(), one_by_one=False),
    ]


def _workload(name: str, orders: Sequence[ImageSpec], *, one_by_one: bool = True) -> ItemList:
    # One call for a whole list is possible only where all orders agree: the batched peer runs same16 alone.
    everyone = None if name == "same16" else frozenset({"plait", "diffusers_fair", "diffusers"})
    return ItemList(
        name=name,
        items=tuple(order.to_json() for order in orders),
        warm_up=tuple(replace(order, steps=_WARM_UP_STEPS).to_json() for order in orders),
        one_by_one=one_by_one,
        systems=everyone,
    )


def _same16() -> list[ImageSpec]:
    return [ImageSpec(prompt=prompt, seed=100 + i, loras=LORA_SETS[0]) for i, prompt in enumerate(PROMPTS)]


def _mixed16() -> list[ImageSpec]:
    """Make 4 LoRA sets x 4 orders: every set has each scheduler once, and one order with each ControlNet."""
    draw = random.Random(_ARRIVAL_SEED)
    orders = []
    for i, prompt in enumerate(PROMPTS):
        group, member = divmod(i, 4)
        orders.append(
            ImageSpec(
                prompt=prompt,
                seed=200 + i,
                steps=draw.randint(FEWEST_STEPS, MAX_STEPS),
                scheduler=SCHEDULERS[member],
                loras=LORA_SETS[group],
                control=(CONTROLNETS[member], i) if member < len(CONTROLNETS) else None,
            )
        )
    draw.shuffle(orders)
    return orders
