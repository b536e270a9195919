"""Which sizes are allowed, and what is told of one that may not be meant."""

from __future__ import annotations

import pytest

from fakes.engine import ALL_TERMS
from fakes.virtual_engine import Virtual
from plait_serving.diffusion.admission import ImageLimits, check_numbers, nearest_size
from plait_serving.diffusion.errors import RequestError
from support.engine import request

SIZES = ("64x32", "32x32-48x96")


@pytest.mark.parametrize("size", [(64, 32), (32, 32), (48, 96), (40, 64)])
def test_a_listed_size_and_one_in_a_range_are_allowed(size):
    """With any other number of sizes beside them; without a list all are."""
    for sizes in (SIZES, ()):
        limits = ImageLimits(sizes=sizes)
        check_numbers(request(width=size[0], height=size[1]), limits, ALL_TERMS)
        assert nearest_size(*size, sizes) == size


@pytest.mark.parametrize(("size", "nearest"), [((64, 40), (64, 32)), ((56, 96), (48, 96)), ((16, 16), (32, 32))])
def test_another_size_is_refused_by_those_that_are_allowed(size, nearest):
    """Its width may be one's and its height another's. What requests without a size get is the nearest."""
    asked = request(width=size[0], height=size[1])
    with pytest.raises(RequestError, match="64x32, 32x32-48x96") as refused:
        check_numbers(asked, ImageLimits(sizes=SIZES), ALL_TERMS)
    assert refused.value.param == "size"
    assert nearest_size(*size, SIZES) == nearest


def test_what_requests_without_a_size_get_is_one_that_the_model_makes():
    """Of a range whose ends are no multiples of its edges, too; its own if it makes none of those."""
    assert nearest_size(64, 64, ("100x100-200x200",), 8) == (104, 104)
    assert nearest_size(512, 512, ("500x500", "768x768", "100x100-107x400"), 16) == (768, 768)
    assert nearest_size(64, 64, ("100x100",), 8) == (64, 64)


@pytest.fixture
def virtual():
    """An engine of a model of 16x16 pixels, whose calls take a second."""
    made = Virtual(lambda rows: 1.0 * rows)
    yield made
    made.rig.engine.stop(drain_s=0)


def hints(virtual, **more):
    return virtual.rig.engine.generate(request("x", **more), timeout_s=60.0).hints


def test_a_size_far_from_the_models_own_and_minutes_of_work_get_a_hint(virtual):
    """With the seconds that are to be expected, by the work of what was measured, however much smaller that was."""
    assert hints(virtual, width=32, height=32) == (
        "size: 32x32, 4 steps; fake was trained for 16x16; how long this takes is not known",
    )
    assert hints(virtual, steps=4) == hints(virtual, steps=119) == ()
    assert hints(virtual, steps=150) == ("size: 16x16, 150 steps; this takes about 150 s here",)
    assert hints(virtual, width=8, height=8) == (
        "size: 8x8, 4 steps; fake was trained for 16x16; this takes about 1.0 s here",
    )
    assert hints(virtual, width=128, height=128, n=2, steps=5) == (
        "size: 128x128, 5 steps; fake was trained for 16x16; this takes about 160 s here",
    )
