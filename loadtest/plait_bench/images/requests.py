"""From an order of a workload to a request to our engine."""

from __future__ import annotations

from plait_bench.images.drawings import control_map
from plait_bench.images.workloads import ImageSpec
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraRef, Scheduler

__all__ = ["image_request"]


def image_request(order: ImageSpec, *, request_id: str, width: int, height: int) -> ImageRequest:
    """Return the request that the server would make of the order, for an image of `width` x `height` pixels."""
    controls: tuple[ControlRef, ...] = ()
    if order.control is not None:
        name, drawing = order.control
        controls = (ControlRef(name=name, image=control_map(name, drawing, width, height)),)
    return ImageRequest(
        request_id=request_id,
        prompt=order.prompt,
        width=width,
        height=height,
        steps=order.steps,
        guidance_scale=order.guidance,
        seed=order.seed,
        scheduler=Scheduler(order.scheduler),
        loras=tuple(LoraRef(name=name, scale=scale) for name, scale in order.loras),
        controlnets=controls,
    )
