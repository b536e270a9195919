"""The sizes of model that the image benchmark runs at: what there is of each, and how much a machine can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plait_bench.errors import BenchError
from plait_bench.fleet.values import ProcessLayout

__all__ = [
    "DTYPES",
    "EDGES",
    "SIZES",
    "DTypeName",
    "DeviceName",
    "ImageSize",
    "LoraSet",
    "Variety",
    "size_of",
]

LoraSet = tuple[tuple[str, float], ...]
DTypeName = Literal["float32", "bfloat16", "float16"]
DeviceName = Literal["cpu", "cuda"]
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")

EDGES = (256, 512, 1024)
"""The image sizes that models of real size are measured at; the last one on GPUs."""

GPU_STEPS, GPU_WARM_UP_STEPS = 20, 4
"""The steps of an image on a GPU: enough that a step counts, and not what surrounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSize:
    """One size of model.

    `base`: its folder; `family`: the architecture to write there if it is missing ("" if models are not written);
    `controlnets`: folders by name. `steps` of an image, `warm_up_steps` of one that only touches everything.
    `lora_sets`: the sets that requests name. `max_processes` of a system, and `max_open` systems (0: all), are what a
    host with 24 GiB can hold. `has_edge`: images have the edge that was asked for; otherwise the model's own.
    `images`: how many orders a workload has, where they are fewer than the starter's.
    `settle_s`: how long each system has the load of a workload before it is measured; it adapts to it in that time.
    `whole_host`: only layouts that use every core are tried, because no model of this size is faster on fewer.
    """

    name: str
    base: str
    steps: int
    warm_up_steps: int
    lora_sets: tuple[LoraSet, ...]
    workloads: tuple[str, ...]
    controlnets: Mapping[str, str]
    family: str = ""
    controlnet_family: str = ""
    has_edge: bool = True
    whole_host: bool = True
    max_processes: int = 2
    max_open: int = 0
    images: Mapping[str, int] = field(default_factory=dict)
    settle_s: float = 60.0

    @property
    def lora_names(self) -> tuple[str, ...]:
        """The names of all LoRAs in the sets."""
        return tuple(dict.fromkeys(name for loras in self.lora_sets for name, _ in loras))

    def row_name(self, workload: str, *, edge: int, dtype: DTypeName) -> str:
        """Return what a workload is called in rows: sizes and dtypes never mix."""
        parts = [self.name] if self.has_edge else []
        parts += [str(edge)] if self.has_edge and edge != EDGES[0] else []
        parts += {"float32": [], "bfloat16": ["bf16"], "float16": ["fp16"]}[dtype]
        return "-".join([*parts, workload])

    def layouts(self, offered: Sequence[ProcessLayout]) -> Sequence[ProcessLayout]:
        """Return the process layouts that are worth a trial at this size."""
        cores = max(layout.processes * layout.threads for layout in offered)
        return [
            layout
            for layout in offered
            if layout.processes <= self.max_processes
            and not (self.whole_host and layout.processes * layout.threads < cores)
        ]


_STARTER_SETS: tuple[LoraSet, ...] = (
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

SIZES: Mapping[str, ImageSize] = {
    size.name: size
    for size in (
        ImageSize(
            name="starter",
            base="emoji",
            steps=20,
            warm_up_steps=3,  # solvers of second order need three to use every one of their formulas
            lora_sets=_STARTER_SETS,
            workloads=(
                "start", "single", "controlnet", "controlnet-service", "lora", "same4", "same16", "mixed4", "mixed16",
                "distinct16",
            ),
            controlnets={"edges": "controlnets/edges", "colors": "controlnets/colors"},
            has_edge=False,
            whole_host=False,
            max_processes=4,
        ),
        ImageSize(
            name="sd15",
            base="sd15",
            family="sd15",
            controlnet_family="sd15-controlnet",
            steps=4,
            warm_up_steps=1,
            lora_sets=_REAL_SETS,
            workloads=("start", "single", "controlnet", "controlnet-service", "lora", "same4", "mixed4"),
            controlnets={"edges": "sd15-controlnet"},
            max_open=2,
            images={"single": 1, "controlnet": 1, "lora": 2},
        ),
        ImageSize(
            name="sdxl",
            base="sdxl",
            family="sdxl",
            controlnet_family="sdxl-controlnet",
            steps=2,
            warm_up_steps=1,
            lora_sets=_REAL_SETS,
            workloads=("start", "single", "controlnet", "lora"),
            controlnets={"edges": "sdxl-controlnet"},
            max_processes=1,
            max_open=1,
            images={"single": 1, "controlnet": 1, "lora": 2},
        ),
    )
}  # fmt: skip
"""The sizes, by name."""


def size_of(name: str) -> ImageSize:
    """Return the size of that name. Raises `BenchError`."""
    if name not in SIZES:
        raise BenchError(f"there is no size {name!r}; there are {', '.join(SIZES)}")
    return SIZES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variety:
    """Which kind of the image benchmark: models, image size and dtype."""

    size: ImageSize = field(default_factory=lambda: SIZES["starter"])
    edge: int = EDGES[0]
    dtype: DTypeName = "float32"
    device: DeviceName = "cpu"

    def __post_init__(self) -> None:
        if self.edge not in EDGES:
            raise BenchError(f"images are {', '.join(map(str, EDGES))} pixels wide, not {self.edge}")

    @property
    def on_gpu(self) -> bool:
        """Whether the systems run on a GPU."""
        return self.device == "cuda"

    @property
    def steps(self) -> tuple[int, int]:
        """The steps of an image, and of one that only touches everything."""
        return (GPU_STEPS, GPU_WARM_UP_STEPS) if self.on_gpu else (self.size.steps, self.size.warm_up_steps)

    def row_name(self, workload: str) -> str:
        """Return what a workload is called in rows."""
        prefix = "gpu-" if self.on_gpu else ""
        return prefix + self.size.row_name(workload, edge=self.edge, dtype=self.dtype)

    @property
    def image_edge(self) -> int | None:
        """The edge that orders ask for; None for the model's own."""
        return self.edge if self.size.has_edge else None
