"""The link model in virtual time: what one message costs, what sharing adds, and the files that say so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_fabric.link.link import PARAMETERS, BadLink
from plait_fabric.link.link_files import LINKS, BadLinkFile, links_document, parse_links, read_links
from plait_fabric.link.modelled import LinkPort
from support.fabric_links import shipped

LINK = shipped().link
SIZES = st.integers(0, 1 << 24)


def test_the_shipped_link_gives_the_table_it_was_made_from() -> None:
    """100 Gb/s: the one-way times of the published ib_send_lat table within 2 %."""
    published_us = {32: 0.82, 1_024: 1.58, 4_096: 2.26, 32_768: 4.57}
    for nbytes, us in published_us.items():
        assert LINK.one_way_s(nbytes) * 1e6 == pytest.approx(us, rel=0.02)


def test_every_shipped_value_has_a_source() -> None:
    """Six links, and for each of their parameters where it comes from."""
    links = read_links(LINKS)
    assert set(links) == {f"{speed}g-{where}" for speed in (100, 200, 400) for where in ("same-switch", "cross-pod")}
    for one in links.values():
        assert all(len(one.sources[name]) > 10 for name in PARAMETERS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 24), st.floats(0, 1e-3)), max_size=30))
def test_no_port_carries_more_than_its_line(messages: list[tuple[bool, int, float]]) -> None:
    """Whatever is posted when: a direction keeps order, never has two messages at once, and is free of the other."""
    port, until_s = LinkPort(), {True: 0.0, False: 0.0}
    for sends, nbytes, at_s in messages:
        busy_s = LINK.busy_s(nbytes)
        begins_s = (port.send if sends else port.receive)(at_s, busy_s)
        assert begins_s == max(at_s, until_s[sends])
        until_s[sends] = begins_s + busy_s


def _document(**said: Any) -> str:
    links = json.loads(LINKS.read_text())
    links["links"]["100g-same-switch"] |= said
    return json.dumps(links)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_s", 1.93),
        ("alpha_s", 1e-8),
        ("bytes_per_s", 12.2),
        ("bytes_per_s", -1),
        ("bytes_per_s", float("nan")),
        ("wire_s", "fast"),
        ("wire_s", True),
        ("wire_s", 1.0e-8),
        ("small_s_per_byte", 1e-12),
        ("inline_bytes", 188.5),
        ("queue_depth", 0),
        ("gap_s", 0.5),
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
        ({"like": "nobody"}, "like: 'nobody' is not another link"),
        ({"like": "100g-cross-pod"}, "like: '100g-same-switch' is not another link"),
    ],
)
def test_bad_entries_say_what_is_wrong(said: dict[str, Any], why: str) -> None:
    """No source, an unknown parameter, and a link that is like itself are named."""
    with pytest.raises(BadLink, match=re.escape(why)):
        parse_links(_document(**said))


def test_a_missing_value_is_named() -> None:
    """A link without one of its parameters says which."""
    document = json.loads(LINKS.read_text())
    del document["links"]["100g-same-switch"]["wire_s"]
    with pytest.raises(BadLink, match="'100g-same-switch': wire_s: is missing"):
        parse_links(json.dumps(document))


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


def test_a_written_file_reads_back() -> None:
    """A document of links holds all that they are."""
    links = read_links(LINKS)
    assert parse_links(links_document(links)) == links


def test_large_and_small_meet() -> None:
    """At 100 Gb/s, where latencies were measured, one-sided begins within 10 % of where two-sided ends."""
    for name in ("100g-same-switch", "100g-cross-pod"):
        link = shipped(name).link
        assert link.one_way_s(link.small_bytes + 1) == pytest.approx(link.one_way_s(link.small_bytes), rel=0.1)
