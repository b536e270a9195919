"""What stays of an image: pixels are put back by the mask, and never over what the safety checker blacked out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes.terms import ALL_TERMS
from plait_serving.diffusion.admission import ImageLimits, check_request
from plait_serving.diffusion.edits import overlaid
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.values import Edit, ImageRequest, LoraPolicy
from support.engine import request

MASK = np.array([[0, 255, 51]], np.uint8)
EDIT = Edit(image=np.full((1, 3, 3), 100, np.uint8), mask=MASK)
MADE = np.full((1, 3, 3), 200, np.uint8)


def asked(**changes) -> ImageRequest:
    """A small edit."""
    edit = Edit(image=np.zeros((16, 8, 3), np.uint8), mask=np.zeros((16, 8), np.uint8), strength=0.5)
    return request(**{"width": 8, "height": 16, "edit": edit, **changes})


def test_pixels_are_mixed_by_the_mask():
    """The image's own at 0, the made ones at 255, a fifth of the way at 51; unless that is not wanted."""
    (found,) = overlaid((MADE,), (False,), EDIT)
    assert found[0, :, 0].tolist() == [100, 200, 120]
    assert overlaid((MADE,), (False,), replace(EDIT, overlay=False)) == (MADE,)


def test_a_flagged_image_stays_black():
    """Of two, only the one that was not flagged gets the image's pixels."""
    black = np.zeros((1, 3, 3), np.uint8)
    first, second = overlaid((black, MADE), (True, False), EDIT)
    assert not first.any()
    assert second[0, 0, 0] == 100


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"width": 16}, "image"),
        ({"edit": Edit(image=np.zeros((16, 8, 3), np.uint8), mask=np.zeros((8, 8), np.uint8))}, "mask"),
        ({"edit": Edit(image=np.zeros((16, 8, 3), np.uint8), strength=0.2)}, "strength"),
        ({"lora_policy": LoraPolicy.BOUNDED_ASYNC, "lora_free_steps": 2}, "lora_free_steps"),
    ],
)
def test_the_engine_refuses_what_cannot_be_an_edit(changes, param):
    """Whoever asks: arrays of another size, no step that runs, LoRAs that would never act."""
    check_request(asked(), ImageLimits(), loras=(), controlnets=(), terms=ALL_TERMS)
    with pytest.raises(RequestError) as caught:
        check_request(asked(**changes), ImageLimits(), loras=(), controlnets=(), terms=ALL_TERMS)
    assert caught.value.param == param


def test_the_last_steps_run():
    """diffusers' rule: the whole part of strength times steps, at least none and at most all."""
    for strength, first, count in ((1.0, 0, 4), (0.5, 2, 2), (0.74, 2, 2), (0.75, 1, 3)):
        one = asked(edit=replace(asked().edit, strength=strength))
        assert (one.first_step, one.run_steps) == (first, count)
    assert (asked(edit=None).first_step, asked(edit=None).run_steps) == (0, 4)
