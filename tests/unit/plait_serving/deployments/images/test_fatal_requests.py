"""What counts as the same request, and for how long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plait_serving.deployments.images.handle import FatalRequests
from plait_serving.diffusion.values import ControlRef, Edit, ImageRequest, LoraRef, Scheduler

IMAGE = np.zeros((4, 4, 3), dtype=np.uint8)
REQUEST = ImageRequest(
    request_id="r", prompt="a \ud800 b", width=16, height=16, steps=4, guidance_scale=7.5, seed=1,
    scheduler=Scheduler.EULER, loras=(LoraRef(name="a"),), controlnets=(ControlRef(name="edges", image=IMAGE),),
    edit=Edit(image=IMAGE, mask=IMAGE[..., 0]),
)  # fmt: skip


async def test_seeds_and_ids_do_not_make_another_request() -> None:
    """A client that leaves the seed to us repeats itself with another one."""
    suspects = FatalRequests()
    assert not suspects.is_refused(REQUEST)
    suspects.killed_two(REQUEST)
    same_image = (ControlRef(name="edges", image=IMAGE.copy()),)
    for same in (
        replace(REQUEST, request_id="x", seed=5),
        replace(REQUEST, deadline_s=3.0, partial_images=2),
        replace(REQUEST, controlnets=same_image),
        replace(REQUEST, edit=Edit(image=IMAGE.copy(), mask=IMAGE[..., 1])),
    ):
        assert suspects.is_refused(same)
    for other in (
        replace(REQUEST, prompt="a"),
        replace(REQUEST, edit=None),
        replace(REQUEST, edit=Edit(image=IMAGE, mask=IMAGE[..., 0] + 1)),
        replace(REQUEST, edit=Edit(image=IMAGE, mask=IMAGE[..., 0], strength=0.5)),
        replace(REQUEST, controlnets=(ControlRef(name="edges", image=IMAGE + 1),)),
        replace(REQUEST, controlnets=(ControlRef(name="edges", image=IMAGE, scale=0.5),)),
    ):
        assert not suspects.is_refused(other)


async def test_images_of_any_size_are_told_apart_by_all_of_their_pixels() -> None:
    """What Python prints of a large one is its corners: a request that reads another image was refused for it."""
    suspects = FatalRequests()
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    suspects.killed_two(replace(REQUEST, edit=None, reference=image))
    assert suspects.is_refused(replace(REQUEST, edit=None, reference=image.copy()))
    image[32, 32] = 1
    assert not suspects.is_refused(replace(REQUEST, edit=None, reference=image))


async def test_a_refusal_ends_and_their_number_is_bounded() -> None:
    """Replicas may have died for another reason; and a memory of all requests would be an attack of its own."""
    now = [0.0]
    suspects = FatalRequests(clock=lambda: now[0])
    suspects.killed_two(REQUEST)
    now[0] = 599.0
    assert suspects.is_refused(REQUEST)
    now[0] = 601.0
    assert not suspects.is_refused(REQUEST)
    killers = [replace(REQUEST, prompt=str(number)) for number in range(1_100)]
    for each in killers:
        suspects.killed_two(each)
    assert [each for each in killers if suspects.is_refused(each)] == killers[-1_024:]
