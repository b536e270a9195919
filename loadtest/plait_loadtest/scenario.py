"""A load description: what is sent where, how fast, for how long, and what is good enough.

The boundary of the package: YAML and flags become one frozen `Scenario`. Unknown keys are errors; nothing is changed
later. Durations are seconds (`_s`) or milliseconds (`_ms`), rates requests per second (`_per_s`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

LoraName: TypeAlias = Annotated[str, Field(pattern=r"^[^/\\:<>]{1,200}$")]
"""What the server may call a LoRA, as far as a mistake is likely."""

_Weight: TypeAlias = Annotated[float, Field(ge=0)]

_LONGEST_S = 1e7  # some 115 days


def _alike(value: object) -> object:
    """Expand the short forms: `20` means `{20: 1}` and `[20, 30]` means `{20: 1, 30: 1}`."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        return {value: 1.0}
    if isinstance(value, list | tuple) and all(isinstance(item, int | str) for item in value):
        return dict.fromkeys(value, 1.0)
    return value


def _weighed(weights: dict[Any, float]) -> dict[Any, float]:
    if not sum(weights.values()) > 0:
        raise ValueError("has no weight above 0")
    if not math.isfinite(sum(weights.values())):
        raise ValueError("has weights whose sum is too large for a number")
    return weights


_WEIGHED = AfterValidator(_weighed)

Weights: TypeAlias = Annotated[dict[str, _Weight], Field(min_length=1), BeforeValidator(_alike), _WEIGHED]
"""Strings and their relative weights in the draw: `{64x64: 3, 64x32: 1}`."""

NamedWeights: TypeAlias = Annotated[dict[Name, _Weight], Field(min_length=1), _WEIGHED]

_Positive: TypeAlias = Annotated[int, Field(ge=1)]

Counts: TypeAlias = Annotated[dict[_Positive, _Weight], Field(min_length=1), BeforeValidator(_alike), _WEIGHED]
"""Whole numbers above 0 and their relative weights in the draw: `{1: 58, 4: 19}`."""

CountsOrNone: TypeAlias = Annotated[
    dict[Annotated[int, Field(ge=0)], _Weight], Field(min_length=1), BeforeValidator(_alike), _WEIGHED
]
"""The same, from 0 on."""

ClassHeaders: TypeAlias = Annotated[
    dict[str, str], Field(description="more headers of this class; those of target.headers come first")
]


class _ScenarioModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# ---- where -----------------------------------------------------------------------------------------------------------


class ResponseCheck(_ScenarioModel):
    """The conditions for a response to count as a success, beyond a 2xx status."""

    contains: str | None = Field(default=None, description="text that the body must contain")
    json_path: str | None = Field(default=None, description="dotted path that the JSON body must have: data.0.b64_json")
    least_bytes: int = Field(default=0, ge=0, description="the body has at least so many bytes")


class LoadTarget(_ScenarioModel):
    """The server. `api` selects the mix and the default path and check."""

    url: str = Field(default="http://127.0.0.1:8000", description="scheme, host and port")
    api: Literal["images", "infer", "raw"] = "images"
    path: str | None = Field(default=None, description="default: /v1/images/generations, /v2/models/MODEL/infer, /")
    model: str | None = Field(default=None, description="name of the model, where the API wants one")
    headers: dict[str, str] = Field(default_factory=dict, description="sent with every request (authorization, ...)")
    timeout_s: float = Field(default=300.0, gt=0, description="from the moment of sending to the last byte")
    connect_timeout_s: float = Field(default=5.0, gt=0)
    verify_tls: bool = True
    ca: Path | None = Field(default=None, description="PEM file of the authorities to trust, instead of the system's")
    check: ResponseCheck = ResponseCheck()


class GeneratorLimits(_ScenarioModel):
    """The generator's own limits; whatever exceeds them is counted as not sent, never hidden."""

    connections: int = Field(default=1024, ge=1, description="open connections of all processes together")
    in_flight: int = Field(default=1024, ge=1, description="requests under way of all processes together")
    response_bytes: int = Field(default=64 << 20, ge=1, description="a larger response is garbled")
    drain_s: float = Field(default=60.0, ge=0, description="how long replies are awaited after the last arrival")
    cancel_rate: float = Field(default=0.0, ge=0, le=1, description="share of requests that are given up on purpose")
    cancel_after_s: float = Field(default=1.0, gt=0)


# ---- when ------------------------------------------------------------------------------------------------------------


class ConstantArrivals(_ScenarioModel):
    """Constant gaps."""

    kind: Literal["constant"] = "constant"
    rate_per_s: float = Field(gt=0)


class PoissonArrivals(_ScenarioModel):
    """Poisson arrivals: independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate_per_s: float = Field(gt=0)


class GammaArrivals(_ScenarioModel):
    """Gamma gaps of shape `burstiness`: 1 is Poisson, below 1 is burstier, above 1 is more even."""

    kind: Literal["gamma"] = "gamma"
    rate_per_s: float = Field(gt=0)
    burstiness: float = Field(default=1.0, ge=0.001, description="0.001: a thousand requests at once, then a pause")


class RampArrivals(_ScenarioModel):
    """A Poisson process whose rate rises (or falls) linearly over the run."""

    kind: Literal["ramp"] = "ramp"
    rate_per_s: float = Field(ge=0, description="at the start")
    to_rate_per_s: float = Field(gt=0, description="at the end")


class StepArrivals(_ScenarioModel):
    """A Poisson process in stages: `[[seconds, rate], ...]`; the last lasts to the end, all are within `duration_s`."""

    kind: Literal["step"] = "step"
    stages: tuple[tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(ge=0)]], ...] = Field(min_length=1)


class TraceArrivals(_ScenarioModel):
    """Arrival times from a CSV file (may be .gz): numbers of seconds, or dates."""

    kind: Literal["trace"] = "trace"
    file: Path
    column: str
    speed: float = Field(default=1.0, gt=0, description="2: twice as fast")
    offset_s: float = Field(default=0.0, ge=0, description="where in the trace the run starts, before speeding up")


class ClosedLoopCallers(_ScenarioModel):
    """Callers that wait for their reply before they send again. This hides overload: for comparison only."""

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(ge=1)


RatedArrivals: TypeAlias = ConstantArrivals | PoissonArrivals | GammaArrivals | RampArrivals | StepArrivals
"""Those that follow from rates."""

Arrivals: TypeAlias = Annotated[RatedArrivals | TraceArrivals | ClosedLoopCallers, Field(discriminator="kind")]


# ---- what ------------------------------------------------------------------------------------------------------------


class Loras(_ScenarioModel):
    """How many LoRAs a request carries and which: by Zipf's law over `names`, or by `popularity`."""

    count: CountsOrNone = Field(default_factory=lambda: {0: 1.0})
    names: tuple[LoraName, ...] = ()
    zipf: float = Field(default=1.0, ge=0, description="exponent over the order of names; 0: all alike")
    popularity: Annotated[dict[LoraName, _Weight], Field(min_length=1), _WEIGHED] | None = Field(
        default=None, description="name: weight, instead of names and zipf"
    )
    scale: float = 1.0


class ControlNets(_ScenarioModel):
    """How many ControlNets a request carries (0 to 3) and which. Control images: files, or drawn by number."""

    count: CountsOrNone = Field(default_factory=lambda: {0: 1.0})
    names: tuple[Name, ...] = ()
    zipf: float = Field(default=1.0, ge=0)
    popularity: NamedWeights | None = None
    scale: float = 1.0
    images: tuple[Path, ...] = Field(default=(), description="images to take in turn; none: drawn by the generator")


class Edits(_ScenarioModel):
    """Which requests start from an image, and how. Images and masks: files, or drawn by number."""

    share: float = Field(default=0.0, ge=0, le=1, description="of the requests of the class")
    masked: float = Field(default=0.0, ge=0, le=1, description="share of these that come with a mask")
    strength: float | None = Field(default=None, gt=0, le=1, description="none: the server's own")
    images: tuple[Path, ...] = Field(default=(), description="images to take in turn; none: drawn by the generator")
    masks: tuple[Path, ...] = Field(default=(), description="one for each of the images")
    path: str = "/v1/images/edits"


class ImageClass(_ScenarioModel):
    """One class of image requests. Classes with `headers` of their own can be tenants with keys of their own."""

    api: Literal["images"] = "images"
    name: Name = "images"
    weight: float = Field(default=1.0, gt=0)
    prompts: tuple[str, ...] = ("red apple", "sunflower")
    prompts_file: Path | None = Field(default=None, description="one prompt a line, instead of prompts")
    models: Weights | None = Field(default=None, description="name: weight, instead of target.model")
    size: Weights | None = Field(default=None, description='"64x64": weight; none: the model\'s own')
    steps: Counts = Field(default_factory=lambda: {20: 1.0})
    images: Counts = Field(default_factory=lambda: {1: 1.0}, description="images per request: weight")
    guidance_scale: float | None = None
    scheduler: str | None = None
    loras: Loras = Loras()
    controlnets: ControlNets = ControlNets()
    edits: Edits = Edits()
    deadline_ms: float | None = Field(default=None, gt=0)
    stream: bool = False
    headers: ClassHeaders = Field(default_factory=dict)
    extra: dict[str, JsonValue] = Field(default_factory=dict, description="more fields of the body, as they are")


class InferInput(_ScenarioModel):
    """One input of a ranking model: `numbers` of them in a row, or ids below `ids`, one in a row or a bag.

    A user input has one row, an item input C. Tensors: numbers FP32 (rows, numbers); ids INT64 (rows,), or for bags
    INT64 (rows * bag,) with NAME_offsets INT64 (rows + 1,).
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    side: Literal["user", "item"] = "item"
    numbers: int | None = Field(default=None, ge=1)
    ids: int | None = Field(default=None, ge=1, description="ids are 0 to this minus 1")
    bag: int | None = Field(default=None, ge=0, description="ids in each row; left out: one, and no offsets")


class InferClass(_ScenarioModel):
    """One class of ranking requests (Open Inference Protocol v2).

    A request scores C candidates: the tensors of `inputs`; or without them dense float32 (C, dense), and for each
    table ids int64 (C, ids_per_table[t]) drawn by Zipf's law from `rows[t]` rows, in one tensor (C, sum of ids).
    """

    api: Literal["infer"] = "infer"
    name: Name = "infer"
    weight: float = Field(default=1.0, gt=0)
    candidates: Counts | Literal["mlperf"] = "mlperf"
    dense: int = Field(default=13, ge=0)
    rows: tuple[_Positive, ...] = Field(default=(1000,), description="rows of each embedding table")
    ids_per_table: tuple[_Positive, ...] | None = Field(default=None, description="default: one of each")
    zipf: float = Field(default=1.05, ge=0)
    binary: bool = Field(default=True, description="binary tensors after the JSON header; else JSON")
    dense_name: str = "dense"
    ids_name: str = "ids"
    inputs: tuple[InferInput, ...] = Field(default=(), description="in place of dense, rows, ids_per_table and names")
    outputs: tuple[str, ...] = ("scores",)
    headers: ClassHeaders = Field(default_factory=dict)


class RawClass(_ScenarioModel):
    """One class of arbitrary requests. `{index}` in path and body becomes the request's number."""

    api: Literal["raw"] = "raw"
    name: Name = "raw"
    weight: float = Field(default=1.0, gt=0)
    method: str = Field(default="GET", pattern=r"^[A-Z]+$")
    path: str | None = Field(default=None, description="default: the target's")
    body: str = ""
    body_file: Path | None = None
    content_type: str = "application/json"
    headers: ClassHeaders = Field(default_factory=dict)


MixClass: TypeAlias = Annotated[ImageClass | InferClass | RawClass, Field(discriminator="api")]


# ---- good enough -----------------------------------------------------------------------------------------------------


class Slo(_ScenarioModel):
    """A response is good if it succeeded within `latency_ms` of its scheduled time."""

    latency_ms: float = Field(gt=0)
    percentile: float | None = Field(
        default=None, gt=0, lt=100, description="share that must be good; default 95 for images, 99 otherwise"
    )


class Scenario(_ScenarioModel):
    """The complete description of a run. The same scenario and seed schedule the same requests at the same times."""

    name: str = "custom"
    target: LoadTarget = LoadTarget()
    arrivals: Arrivals = PoissonArrivals(rate_per_s=1.0)
    duration_s: float = Field(default=30.0, gt=0, le=_LONGEST_S, description="of the measured part")
    count: int | None = Field(default=None, ge=1, description="end after so many measured requests instead")
    warm_up_s: float = Field(default=0.0, ge=0, le=_LONGEST_S, description="same load before it; not measured")
    seed: int = Field(default=0, ge=0)
    processes: int = Field(default=1, ge=1, le=64)
    mix: tuple[MixClass, ...] = (ImageClass(),)
    limits: GeneratorLimits = GeneratorLimits()
    slo: Slo | None = Field(default=None, description="of every class that has none of its own in slos")
    slos: dict[Name, Slo] = Field(default_factory=dict, description="by class name")
    thresholds: tuple[str, ...] = Field(default=(), description='"p99_ms < 250": exit code 99 if one is missed')
    needs: tuple[str, ...] = Field(default=(), description="settings that have no default and must be given")

    @property
    def callers(self) -> int:
        """The callers of a closed loop; 0: requests have a schedule."""
        return self.arrivals.concurrency if isinstance(self.arrivals, ClosedLoopCallers) else 0
