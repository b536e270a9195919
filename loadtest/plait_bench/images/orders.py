"""The sizes of model that the image benchmark runs at, and which images each workload orders, in which sequence. Fixed
by seeds; no torch.

A cost is an order's steps, where a step with a ControlNet counts one and a half times (a ControlNet is a second copy of
a UNet's encoder half).
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from plait_bench.errors import BenchError
from plait_bench.images.fleet import ItemList

LoraSet = tuple[tuple[str, float], ...]
DTypeName = Literal["float32", "bfloat16", "float16"]
ImageArray: TypeAlias = npt.NDArray[np.uint8]
"""`uint8 (H, W, 3)`."""

STARTER_EDGE = 64
EDGES = (256, 512, 1024)
"""The image sizes that models of real size are measured at; the last one on GPUs."""

GUIDANCE = 3.0
FEWEST_STEPS, MAX_STEPS = 12, 30
_ARRIVAL_SEED = 20_251
_SETTLE_S = 60.0

PROMPTS = (
    "red apple", "dog face", "grinning face", "sunflower", "soccer ball", "rocket", "crescent moon", "octopus",
    "birthday cake", "umbrella", "cactus", "sailboat", "owl", "guitar", "snowman", "strawberry",
)  # fmt: skip
LORA_SETS: tuple[LoraSet, ...] = (
    (("noto", 1.0),),
    (("sketch", 1.0),),
    (("pixel", 0.8),),
    (("noto", 0.6), ("pixel", 0.5)),
)
_REAL_SETS: tuple[LoraSet, ...] = (
    (("style1", 1.0),),
    (("style2", 0.8),),
    (("style3", 1.0),),
    (("style1", 0.6), ("style4", 0.5)),
)
CONTROLNETS = ("edges", "colors")
SCHEDULERS = ("ddim", "euler", "dpmpp_2m", "unipc")

START = "start"

_COUNTS = {START: 1, "single": 3, "controlnet": 3, "lora": 4, "same4": 4, "same16": 16, "mixed4": 4}
_FEW = {"single": 1, "controlnet": 1, "lora": 2}
"""How many orders a workload has, and has at real size where that is fewer."""
DISTINCT = 16
"""The number of orders of `distinct16`, each with a LoRA set of its own."""

CONCURRENT = frozenset({"same4", "same16", "mixed4", "mixed16", "distinct16"})
"""The workloads whose orders come at the same time; in the others each comes when the one before is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """One size of model, in one dtype, and the size of its images.

    `family`: the architecture of what is written if it is missing ("": the starter's models, which are there). `steps`
    of an image, `warm_up_steps` of one that only touches everything. `lora_sets`: the sets that requests name.
    `max_open`: the processes with a model, and the open systems, that a host with 24 GiB can hold (0: all).
    `is_transformer`: it is measured in the one dtype that pays on the CPU, in bfloat16 at 512 pixels, and nothing is
    converted for it. `words`: what `plait models random` is told beside the architecture. `on_gpu`: the systems run on
    a GPU, each in one process. `edge`: of images at real size.
    """

    name: str
    steps: int
    workloads: tuple[str, ...]
    lora_sets: tuple[LoraSet, ...] = _REAL_SETS
    warm_up_steps: int = 1
    family: str = ""
    max_open: int = 0
    is_transformer: bool = False
    words: tuple[str, ...] = ()
    on_gpu: bool = False
    edge: int = EDGES[0]
    dtype: DTypeName = "float32"

    def __post_init__(self) -> None:
        if self.edge not in EDGES:
            raise BenchError(f"images are {', '.join(map(str, EDGES))} pixels wide, not {self.edge}")

    def for_gpu(self) -> Self:
        """Return it as it is measured on a GPU: in so many steps that they count, and not what surrounds them."""
        return replace(self, on_gpu=True, steps=20, warm_up_steps=4, max_open=0)

    def of(self, dtype: DTypeName, edge: int | None) -> Self:
        """Return it in a dtype, with images of an edge, or the usual one."""
        usual = EDGES[1] if self.is_transformer and dtype == "bfloat16" else EDGES[0]
        return replace(self, dtype=dtype, edge=edge or usual)

    def row_name(self, workload: str) -> str:
        """Return what a workload is called in rows: sizes and dtypes never mix."""
        parts = ["gpu"] if self.on_gpu else []
        parts += [self.name] if self.family else []
        parts += [str(self.edge)] if self.family and self.edge != EDGES[0] else []
        parts += {"float32": [], "bfloat16": ["bf16"], "float16": ["fp16"]}[self.dtype]
        return "-".join([*parts, workload])

    @property
    def image_edge(self) -> int:
        """The edge that orders ask for."""
        return self.edge if self.family else STARTER_EDGE

    @property
    def base(self) -> str:
        """The folder of the base model."""
        return self.name if self.family else "emoji"

    def controlnet(self, name: str) -> str:
        """Return the folder of a ControlNet."""
        return f"{self.name}-controlnet" if self.family else f"controlnets/{name}"

    @property
    def lora_names(self) -> tuple[str, ...]:
        """The names of all LoRAs in the sets."""
        return tuple(dict.fromkeys(name for loras in self.lora_sets for name, _ in loras))


SIZES: Mapping[str, ImageSize] = {
    size.name: size
    for size in (
        ImageSize(
            name="starter",
            steps=20,
            warm_up_steps=3,  # solvers of second order need three to use every one of their formulas
            lora_sets=LORA_SETS,
            workloads=(
                START, "single", "controlnet", "controlnet-service", "lora", "same4", "same16", "mixed4", "mixed16",
                "distinct16",
            ),
        ),
        ImageSize(
            name="sd15",
            family="sd15",
            steps=4,
            workloads=(START, "single", "controlnet", "controlnet-service", "lora", "same4", "mixed4"),
            max_open=2,
        ),
        ImageSize(
            name="sdxl",
            family="sdxl",
            steps=2,
            workloads=(START, "single", "controlnet", "lora"),
            max_open=1,
        ),
        ImageSize(
            name="sd35m",
            family="sd3.5-medium",
            words=("--no-t5", "--dtype", "bfloat16"),
            steps=2,
            workloads=(START, "single", "same4", "mixed4"),
            max_open=1,
            is_transformer=True,
        ),
    )
}  # fmt: skip


def size_of(name: str) -> ImageSize:
    """Return the size of that name. Raises `BenchError`."""
    if name not in SIZES:
        raise BenchError(f"there is no size {name!r}; there are {', '.join(SIZES)}")
    return SIZES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """One image. `control` is a ControlNet's name and the number of its drawing (`control_map`); `edge` its width and
    height."""

    prompt: str
    seed: int
    steps: int
    scheduler: str = "ddim"
    guidance: float = GUIDANCE
    loras: tuple[tuple[str, float], ...] = ()
    control: tuple[str, int] | None = None
    edge: int = STARTER_EDGE


def cost(order: ImageSpec) -> float:
    """Return the relative cost of an order: its steps, half as much again with a ControlNet."""
    return order.steps * (1.5 if order.control else 1.0)


def workload(name: str, size: ImageSize) -> ItemList:
    """Make a workload."""
    orders = [replace(order, edge=size.image_edge) for order in _orders(name, size)]
    one_by_one = name not in CONCURRENT
    return ItemList(
        name=size.row_name(name),
        items=tuple(orders),
        warm_up=tuple(replace(order, steps=size.warm_up_steps) for order in orders),
        one_by_one=one_by_one,
        trial_items=1 if one_by_one and size.family else 0,
        max_processes=1 if size.on_gpu else size.max_open or 4,
        is_wide=size.on_gpu or bool(size.family),  # no model of real size is faster on fewer cores than there are
        settle_s=0.0 if size.on_gpu else _SETTLE_S,
    )


def _orders(name: str, size: ImageSize) -> list[ImageSpec]:
    sets = size.lora_sets
    if name == "mixed16":
        return _mixed16(size)
    if name == "distinct16":
        return [_order(size, i, 300 + i, loras=loras) for i, loras in enumerate(distinct_sets(size.lora_names))]
    count = {**_COUNTS, **(_FEW if size.family else {})}.get(name, _COUNTS["controlnet"])  # as `controlnet-service`
    if name in {"controlnet", "controlnet-service"}:
        return [_order(size, i, i, control=("edges", i)) for i in range(count)]
    if name == "same16":  # sixteen customers of one style
        return [_order(size, i, 100 + i, loras=sets[0]) for i in range(count)]
    if name in {"lora", "mixed4"}:
        return [_order(size, i, i, loras=sets[i % len(sets)]) for i in range(count)]
    return [_order(size, i, i) for i in range(count)]


def _order(size: ImageSize, prompt: int, seed: int, **more: Any) -> ImageSpec:
    own = {"steps": size.steps, **({"scheduler": "euler"} if size.is_transformer else {})}
    return ImageSpec(prompt=PROMPTS[prompt], seed=seed, **{**own, **more})


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
        steps, loras = draw.randint(FEWEST_STEPS, MAX_STEPS), size.lora_sets[group]
        orders.append(_order(size, i, 200 + i, steps=steps, scheduler=SCHEDULERS[member], loras=loras, control=control))
    draw.shuffle(orders)
    return orders


def control_map(drawing: int, edge: int) -> ImageArray:
    """Return the load tester's control image of that number, `uint8 (edge, edge, 3)`."""
    from plait_loadtest.mix.control_images import control_image  # which a peer's environment lacks

    return np.asarray(Image.open(io.BytesIO(control_image(drawing, edge, edge))).convert("RGB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The paths of the base model, the ControlNets and the LoRAs, by name."""

    root: Path
    base: Path
    controlnets: Mapping[str, Path]
    loras: Mapping[str, Path]

    @classmethod
    def of(cls, root: Path, size: ImageSize, orders: Sequence[ImageSpec]) -> Self:
        """Return the models that the orders need."""
        controlnets = sorted({order.control[0] for order in orders if order.control})
        loras = sorted({name for order in orders for name, _ in order.loras})
        return cls(
            root=root,
            base=root / size.base,
            controlnets={name: root / size.controlnet(name) for name in controlnets},
            loras={name: root / "loras" / f"{name}.safetensors" for name in loras},
        )

    def missing(self) -> list[Path]:
        """List the files that are not there, one for each model."""
        needed = [self.base / "model_index.json", *self.loras.values()]
        needed += [path / "config.json" for path in self.controlnets.values()]
        return [path for path in needed if not path.is_file()]
