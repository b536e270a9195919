"""A base model: what is always known of it, and what steps it while its weights are in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from plait_serving.diffusion.admission import ImageLimits, check_size, nearest_size
from plait_serving.diffusion.errors import ModelError, RequestError
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.memory import gigabytes, pixels_that_fit
from plait_serving.diffusion.protocols import ControlNetClient
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.forecast import WorkForecast
from plait_serving.diffusion.stepper import Stepper

_log = logging.getLogger(__name__)

_READ_BYTES_PER_S = 1e9
_MIN_LOAD_S = 0.1
"""What loading is thought to take before it was measured: a local disk's pace, and building the modules."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Model:
    """One base model. `costs` and `forecast` say what its steps and requests take; `unfit`, by name, why ControlNets
    are none for it.

    `stepper`: None while the model is not resident. `leaves`: it is about to make room, and begins no request any more.
    Both are the compute thread's. `is_retired`: it takes no request any more, and leaves for good after the last one.
    `goes_to_sleep`: it leaves after the last one, until it is asked for again.

    By the pool's clock: `used_s`, when it was last used; `woken_s`, when it was told to come without a request;
    `overtaken_s`: the seconds that requests computed which arrived after those that wait for it. `loaded_in_s`: what it
    was last loaded in. `usual_s`: the compute-seconds of a usual request.
    """

    name: str
    family: Family
    limits: ImageLimits
    loras: LoraCache
    costs: StepCosts
    controlnets: Mapping[str, ControlNetClient] = field(default_factory=dict)
    unfit: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    forecast: WorkForecast = field(init=False)
    stepper: Stepper | None = None
    leaves: bool = False
    is_retired: bool = False
    goes_to_sleep: bool = False
    used_s: float = 0.0
    woken_s: float | None = None
    overtaken_s: float = 0.0
    loaded_in_s: float | None = None
    usual_s: float | None = None

    def __post_init__(self) -> None:
        self.forecast = WorkForecast(self.costs)

    @property
    def steps(self) -> Stepper:
        """What steps it, while it is resident."""
        assert self.stepper is not None
        return self.stepper

    @property
    def nbytes(self) -> int:
        """What its weights take in memory, and its share of the text encoders'."""
        return self.family.weights_bytes + self.family.shared_bytes()

    @property
    def least_nbytes(self) -> int:
        """The same once all text encoders have left that can."""
        return self.family.weights_bytes + self.family.shared_bytes(left=True)

    @property
    def load_s(self) -> float:
        """The seconds that loading it is expected to take."""
        return _MIN_LOAD_S + self.nbytes / _READ_BYTES_PER_S if self.loaded_in_s is None else self.loaded_in_s

    def load(self) -> Stepper:
        """Bring the weights into memory, on any thread; return what steps them. Raises `ModelError`."""
        return Stepper(denoiser=self.family.load(), controlnets=self.controlnets, clock=self.clock)

    def leave(self) -> None:
        """Let go of the weights. Between two steps."""
        self.stepper, self.leaves = None, False
        self.family.leave()

    def close(self) -> None:
        """Release the clients of its ControlNets. Idempotent."""
        for client in self.controlnets.values():
            client.shutdown()


def image_limits(family: Family, wanted: ImageLimits, free_bytes: int) -> ImageLimits:
    """Return what requests may ask for: at most what is wanted, in sizes that the model can take and that the free
    memory can hold. Raises `ModelError` if what requests without a size would get is none of those that are wanted."""
    limits = replace(wanted, size_multiple=family.size_multiple, min_edge_px=family.size_multiple)
    if limits.sizes:
        try:
            check_size(*nearest_size(family.width, family.height, limits.sizes, limits.size_multiple), limits)
        except RequestError as error:
            raise ModelError(f"images.limits.sizes: requests without a size would all be refused: {error}") from error
    free, native = max(0, free_bytes), family.width * family.height
    pixels = pixels_that_fit(family.decoding_bytes_per_pixel, free, native=native, limit=limits.max_pixels)
    if pixels < limits.max_pixels:
        _log.info("images of at most %d pixels: %s of memory are left", pixels, gigabytes(free))
    return replace(limits, max_pixels=pixels)
