"""The image and the table of a cut."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from torch import nn

from plait_disagg.graph.capture import capture
from plait_disagg.graph.costs import cut_problem
from plait_disagg.graph.cutters import CUTTERS
from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import Dense, Ids
from plait_disagg.graph.report import cut_report, human_bytes
from plait_disagg.graph.svg import cut_svg
from plait_disagg.graph.tile import tile
from plait_disagg.models.configs import ids_per_bag
from support.graph import model

SVG = "{http://www.w3.org/2000/svg}"


def report_of(name, cutter="mincut"):
    _, captured = model(name)
    program = tile(captured.program)
    per_bag = {} if name in ("small", "zoo") else ids_per_bag(name)
    problem = cut_problem(program, dict.fromkeys(reads(program), 1e-5), candidates=64, ids_per_bag=per_bag)
    return program, cut_report(program, CUTTERS[cutter](problem), ids_per_bag=per_bag)


def test_like_tables_are_one_box_and_bytes_are_what_arithmetic_says():
    """rm1: six user-side lookups are one box, two candidate-side ones another, and an MLP says its widths; 128 numbers
    and six pooled vectors of 32 cross once, two per candidate."""
    _, report = report_of("rm1")
    titles = [(group.place, group.rows, group.title) for group in report.groups if not group.is_input]
    assert ("cn", "user", "6 × lookup, sum, 32 wide") in titles
    assert ("cn", "item", "2 × lookup, sum, 32 wide") in titles
    assert ("hn", "user", "MLP 128-64-32") in titles
    assert len(report.groups) <= 8
    assert report.bytes_at(64) == 128 * 4 + 6 * 32 * 4 + 64 * 2 * 32 * 4
    assert report.to_json()["bytes_per_request"] == {str(n): report.bytes_at(n) for n in (1, 64, 512)}
    assert json.loads(json.dumps(report.to_json()))["crosses"]
    text = report.to_text()
    assert f"{report.bytes_at(512):,}" in text
    assert "6 × (users, 32) float32" in text


@pytest.mark.parametrize(("name", "cutter"), [("small", "mincut"), ("zoo", "prism"), ("din", "mincut")])
def test_the_picture_is_xml_with_a_box_per_group_and_a_label_per_crossing(name, cutter):
    """The SVG parses, has a box for every group, and writes the bytes of everything that crosses. Every value is in one
    group, and a group is read only by later ones."""
    program, report = report_of(name, cutter)
    members = [member for group in report.groups for member in group.members]
    assert len(members) == len(set(members))
    assert set(reads(program)) <= set(members)
    assert all(reader > index for index, group in enumerate(report.groups) for reader in group.readers)
    root = ET.fromstring(cut_svg(report, title="a <model> & more"))
    boxes = [rect for rect in root.iter(f"{SVG}rect") if rect.get("rx") == "6"]
    assert len(boxes) == len(report.groups)
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    labels = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "bytes"]
    assert labels == [human_bytes(crossing.bytes_at[64]) for crossing in report.crossings]
    assert any(text.startswith("a <model> & more") for text in texts)
    heights = [float(rect.get("y")) + float(rect.get("height")) for rect in boxes]
    assert max(heights) < float(root.get("height"))


class _Spread(nn.Module):
    """A score, and beside it something wide that is made of a few ids."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 1)

    def forward(self, *, x, kind):
        wide = nn.functional.one_hot(kind, 100).to(x.dtype)
        return {"score": self.out(x).squeeze(1), "kind": wide, "twice": wide * 2}


def test_an_ancestor_crosses_instead_of_its_larger_descendants():
    """By Prism's cut too: one id of 8 bytes is sent, not the two vectors of 100 numbers that the HN can make of it."""
    captured = capture(_Spread().eval(), (Dense("x", shape=(2,)), Ids("kind")))
    program = tile(captured.program)
    problem = cut_problem(program, dict.fromkeys(reads(program), 1e-5), candidates=64, ids_per_bag={})
    report = cut_report(program, CUTTERS["prism"](problem), ids_per_bag={})
    assert [crossing.names for crossing in report.crossings] == [("x",), ("kind",)]
    assert report.bytes_at(64) == 64 * (2 * 4 + 8)
