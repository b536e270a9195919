"""The starter's preprocessors and filters, on small images whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from plait_serving.starter.preprocess import block_means, colors, edge_mask, edges, pixel, sketch, unblock


def square(side_px: int = 64, low_px: int = 20, high_px: int = 44) -> np.ndarray:
    """A red square on white."""
    image = np.full((side_px, side_px, 3), 255, dtype=np.uint8)
    image[low_px:high_px, low_px:high_px] = (200, 20, 20)
    return image


def naive_means(image: np.ndarray, block_px: int) -> np.ndarray:
    """``block_means`` the slow way."""
    rows = range(0, image.shape[0], block_px)
    columns = range(0, image.shape[1], block_px)
    blocks = [[image[y : y + block_px, x : x + block_px].reshape(-1, 3).mean(0) for x in columns] for y in rows]
    return np.array(blocks)


@pytest.mark.parametrize("shape", [(64, 64), (5, 9), (8, 3), (1, 1)])
def test_block_means_equal_the_slow_way(shape):
    """Means of whole and of cut blocks are what a plain loop gives."""
    image = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    assert np.allclose(block_means(image, 4), naive_means(image, 4))


@pytest.mark.parametrize("make", [edges, colors, sketch, pixel])
@pytest.mark.parametrize("shape", [(64, 64), (33, 70)])
def test_filters_keep_shape_and_input(make, shape):
    """Each filter returns a new uint8 image of the same size and leaves its input alone."""
    image = np.random.default_rng(2).integers(0, 256, (*shape, 3), dtype=np.uint8)
    before = image.copy()
    made = make(image)
    assert made.shape == image.shape
    assert made.dtype == np.uint8
    assert np.array_equal(image, before)
    assert np.array_equal(make(image), made)


def test_edges_follow_the_outline_and_only_that():
    """A square gives one thin closed line within a pixel of its border, white on black; a flat image nothing."""
    mask = edge_mask(square())
    assert np.array_equal(edges(square()), np.where(mask, 255, 0)[..., None].repeat(3, axis=2))
    y, x = np.nonzero(mask)
    distance = np.maximum(np.abs(y - 31.5), np.abs(x - 31.5))
    assert 80 <= mask.sum() <= 110
    assert np.all(np.abs(distance - 12) <= 1.5)
    assert not edge_mask(np.full((64, 64, 3), 77, dtype=np.uint8)).any()


def test_edges_see_a_change_of_hue_alone():
    """Red against green of the same brightness is an edge: channels are judged apart."""
    image = np.zeros((32, 32, 3), dtype=np.uint8)
    image[:, :16, 0] = 150
    image[:, 16:, 1] = 150
    assert edge_mask(image)[:, 14:18].any(axis=1).all()


def test_edges_drop_weak_lines_without_a_strong_end():
    """Hysteresis: a faint line alone is no edge, the same line joined to a strong one is."""
    fading = np.full((32, 64, 3), 255, dtype=np.uint8)
    fading[16:] = np.linspace(155, 240, 64).astype(np.uint8)[None, :, None]
    faint = fading[:, 52:]
    assert not edge_mask(faint).any()
    assert edge_mask(fading)[14:18, 52:60].any(axis=0).all()


def test_colors_and_pixel_are_flat_in_blocks_and_stay_when_repeated():
    """``colors`` is flat in 4x4 and ``pixel`` in 8x8 blocks, and doing it twice changes nothing."""
    image = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for make, block_px in ((colors, 4), (pixel, 8)):
        made = make(image)
        assert np.array_equal(made, unblock(block_means(made, block_px), block_px, 64, 64))
        assert np.array_equal(make(made), made)
        assert np.abs(block_means(made, block_px) - block_means(image, block_px)).max() <= 0.5


def test_sketch_is_grey_and_dark_on_outlines():
    """Lines are dark, flat areas white, and there is no colour."""
    made = sketch(square())
    assert np.array_equal(made[..., 0], made[..., 1])
    assert made[32, 32, 0] == 255
    assert made[20, 32, 0] < 100
