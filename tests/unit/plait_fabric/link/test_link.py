"""The link model in virtual time: what one message costs, what sharing adds, and the files that say so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plait_fabric.link.link import BadLink
from plait_fabric.link.link_files import LINKS, BadLinkFile, parse_links, read_links
from support.fabric_links import shipped

LINK = shipped().link


def test_the_shipped_link_gives_the_table_it_was_made_from() -> None:
    """100 Gb/s: the one-way times of the published ib_send_lat table within 2 %."""
    published_us = {32: 0.82, 1_024: 1.58, 4_096: 2.26, 32_768: 4.57}
    for nbytes, us in published_us.items():
        assert LINK.one_way_s(nbytes) * 1e6 == pytest.approx(us, rel=0.02)


def _document(**said: Any) -> str:
    links = json.loads(LINKS.read_text())
    link = links["links"]["100g-same-switch"] | said
    links["links"]["100g-same-switch"] = {name: value for name, value in link.items() if value is not None}
    return json.dumps(links)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_s", 1.93),
        ("bytes_per_s", 12.2),
        ("bytes_per_s", float("nan")),
        ("wire_s", "fast"),
        ("wire_s", True),
        ("small_s_per_byte", 1e-12),
        ("queue_depth", 0),
        ("gap_s", 0.5),
        ("gap_s", 10**400),
    ],
)
def test_absurd_values_are_refused_by_name(field: str, value: object) -> None:
    """A value that no link has, or that contradicts the others, is refused, and the message names it."""
    with pytest.raises(BadLink, match=rf"100g-same-switch.*{field}"):
        parse_links(_document(**{field: {"value": value, "source": "a slip"}}))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"alpha_s": 2e-6}, "alpha_s: must be an object of value and source"),
        ({"alpha_s": {"value": 2e-6, "source": " "}}, "alpha_s: must say its source"),
        ({"latency": {"value": 2e-6, "source": "x"}}, "latency: is no parameter"),
        ({"wire_s": None}, "wire_s: is missing"),
        ({"like": "nobody"}, "like: 'nobody' is not another link"),
        ({"like": "100g-cross-pod"}, "like: '100g-same-switch' is not another link"),
    ],
)
def test_bad_entries_say_what_is_wrong(said: dict[str, Any], why: str) -> None:
    """No source, an unknown parameter, one that is missing, and a link that is like itself are named."""
    with pytest.raises(BadLink, match=re.escape(why)):
        parse_links(_document(**said))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "plait.links", "version": 2, "links": {}}', "[" * 100_000]
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    """What is not a file of links is one clear error, whatever it is."""
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(BadLinkFile):
        read_links(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadLinkFile):
        read_links(path)
