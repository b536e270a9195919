"""The measuring code, fed with images whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest

from plait_serving.starter.preprocess import pixel, sketch
from plait_serving.starter.references import make_references
from plait_serving.starter.verify import VerificationImage, edge_f1, verify

COUNT = 12


@pytest.fixture(scope="module")
def artwork():
    """Twelve images of large random blocks, each shifted by its own amount, and twelve others: (twemoji, noto)."""
    rng = np.random.default_rng(5)
    coarse = rng.integers(0, 256, (2 * COUNT, 3, 3, 3), dtype=np.uint8)
    fine = coarse.repeat(22, axis=1).repeat(22, axis=2)[:, :64, :64]
    fine = np.stack([np.roll(p, (2 * i, 5 * i), axis=(0, 1)) for i, p in enumerate(fine)])
    return fine[:COUNT], fine[COUNT:]


@pytest.fixture(scope="module")
def refs(artwork):
    """References of the random artwork."""
    return make_references(tuple(f"thing {i}" for i in range(COUNT)), *artwork)


def perfect(artwork, refs):
    """A generator that does exactly what is asked for."""
    twemoji, noto = artwork

    def make(ask: VerificationImage) -> np.ndarray:
        row = refs.names.index(ask.prompt)
        if ask.control_image is not None:
            maps = refs.edge_map if ask.controlnet == "edges" else refs.color_map
            (row,) = (i for i in range(COUNT) if np.array_equal(maps(i), ask.control_image))
        styled = {None: lambda: twemoji[row], "noto": lambda: noto[row],
                  "sketch": lambda: sketch(twemoji[row]), "pixel": lambda: pixel(twemoji[row])}  # fmt: skip
        return styled[ask.lora]()

    return lambda asks: [make(ask) for ask in asks]


def test_a_perfect_model_passes(artwork, refs):
    """Right images pass every figure, and the figures are the extreme ones."""
    report = verify(perfect(artwork, refs), refs)
    values = {figure["name"]: figure["value"] for figure in report["figures"]}
    assert report["passed"]
    assert values["recognition_top1"] == values["edges_f1"] == values["noto_share"] == 1.0
    assert values["colors_error"] == pytest.approx(0, abs=0.01)


def test_a_model_that_ignores_add_ons_fails(artwork, refs):
    """Without effect of ControlNets and LoRAs their figures miss the bounds, recognition does not."""
    make = perfect(artwork, refs)
    report = verify(lambda asks: make([VerificationImage(prompt=a.prompt, seed=a.seed) for a in asks]), refs)
    passed = {figure["name"]: figure["passed"] for figure in report["figures"]}
    assert passed["recognition_top1"]
    for name in ("edges_f1", "edges_f1_gain", "colors_error", "noto_share", "sketch_share", "pixel_unevenness"):
        assert not passed[name], name
    assert not report["passed"]


def test_another_concept_is_used_as_control(artwork, refs):
    """No ControlNet request carries the map of its own prompt, and seeds are the positions."""
    asked: list[VerificationImage] = []
    make = perfect(artwork, refs)
    verify(lambda asks: (asked.extend(asks), make(asks))[1], refs, parts=("edges", "colors"))
    controlled = [ask for ask in asked if ask.controlnet is not None]
    assert len(controlled) == 2 * COUNT
    for ask in controlled:
        maps = refs.edge_map if ask.controlnet == "edges" else refs.color_map
        assert not np.array_equal(maps(refs.names.index(ask.prompt)), ask.control_image)
    assert [ask.seed for ask in controlled[:COUNT]] == list(range(COUNT))


def test_edge_f1_forgives_one_pixel_not_two():
    """A line shifted by one pixel counts in full, by two not at all."""
    line = np.zeros((16, 16), dtype=bool)
    line[8] = True
    assert edge_f1(np.roll(line, 1, 0), line) == pytest.approx(1.0)
    assert edge_f1(np.roll(line, 2, 0), line) == pytest.approx(0.0, abs=1e-6)
    assert edge_f1(np.zeros_like(line), np.zeros_like(line)) == 1.0
