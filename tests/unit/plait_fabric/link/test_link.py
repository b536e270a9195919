"""The link model in virtual time: what one message costs, what sharing adds, and the files that say so."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_fabric.link.link import PARAMETERS, BadLink
from plait_fabric.link.link_files import LINKS, BadLinkFile, links_document, parse_links, read_links
from plait_fabric.link.nic import Nic, QueuePair
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


@given(SIZES, st.floats(0, 1e6))
def test_an_idle_network_takes_what_the_formula_says(nbytes: int, at_s: float) -> None:
    """One message over idle ports is delivered after T(n), a READ after its round trip, and neither queues."""
    sent = QueuePair(LINK, Nic(), Nic()).post([nbytes], at_s)[0]
    read = QueuePair(LINK, Nic(), Nic()).read(nbytes, at_s)
    assert sent.delivered_s - at_s == pytest.approx(LINK.one_way_s(nbytes), abs=1e-9)
    assert read.delivered_s - at_s == pytest.approx(LINK.read_s(nbytes), abs=1e-9)
    assert sent.queued_s == pytest.approx(0, abs=1e-9)
    assert sent.completed_s > sent.delivered_s
    assert read.delivered_s - at_s > LINK.one_way_s(nbytes)


def test_incast_is_served_one_after_the_other() -> None:
    """k hosts that send n bytes to one at once: the last is delivered at alpha + k n / beta."""
    target, nbytes, senders = Nic(), 1 << 20, 8
    sent = [QueuePair(LINK, Nic(), target).post([nbytes], 0.0)[0] for _ in range(senders)]
    assert sent[-1].delivered_s == pytest.approx(LINK.alpha_s + senders * nbytes / LINK.bytes_per_s)
    assert sent[-1].queued_s == pytest.approx((senders - 1) * nbytes / LINK.bytes_per_s)


def test_pairs_of_one_host_share_its_port() -> None:
    """Two queue pairs of one host to two others take turns at its port; those of two hosts do not."""
    shared = Nic()
    nbytes = 1 << 20
    ours = [QueuePair(LINK, shared, Nic()).post([nbytes], 0.0)[0] for _ in range(2)]
    apart = [QueuePair(LINK, Nic(), Nic()).post([nbytes], 0.0)[0] for _ in range(2)]
    assert ours[1].delivered_s - ours[0].delivered_s == pytest.approx(nbytes / LINK.bytes_per_s)
    assert apart[1].delivered_s == apart[0].delivered_s


def test_both_directions_are_free_of_each_other() -> None:
    """What a host receives does not slow what it sends."""
    one, other = Nic(), Nic()
    there = QueuePair(LINK, one, other).post([1 << 20], 0.0)[0]
    back = QueuePair(LINK, other, one).post([1 << 20], 0.0)[0]
    assert there.delivered_s == back.delivered_s


def test_small_messages_in_a_row_pay_the_gap_only() -> None:
    """Posted together, small messages share a doorbell and follow each other by the post, not by their latency."""
    sent = QueuePair(LINK, Nic(), Nic()).post([32] * 10, 0.0)
    gaps_s = [after.delivered_s - before.delivered_s for before, after in pairwise(sent)]
    assert gaps_s == pytest.approx([max(LINK.gap_s, LINK.post_s)] * 9)
    one_by_one = QueuePair(LINK, Nic(), Nic())
    rung = [one_by_one.post([32], n * LINK.sender_s)[0] for n in range(10)]
    assert rung[-1].delivered_s > sent[-1].delivered_s


def test_a_full_queue_pair_waits_for_completions() -> None:
    """With room for one work request, the second starts when the first is acknowledged; the same for READs."""
    tight = replace(LINK, queue_depth=1)
    first, second = QueuePair(tight, Nic(), Nic()).post([32, 32], 0.0)
    assert second.delivered_s >= first.completed_s + LINK.wire_s
    pair = QueuePair(replace(LINK, reads_in_flight=1), Nic(), Nic())
    reads = [pair.read(64, 0.0) for _ in range(3)]
    assert [read.delivered_s for read in reads] == pytest.approx([n * LINK.read_s(64) for n in (1, 2, 3)])


@given(st.lists(st.tuples(SIZES, st.floats(0, 1e-3), st.integers(0, 1), st.integers(0, 1)), max_size=30))
def test_no_port_carries_more_than_its_line(posts: list[tuple[int, float, int, int]]) -> None:
    """Whatever is posted when: a pair keeps order, nothing beats its idle time, and bytes never beat the line."""
    sources, targets = [Nic(), Nic()], [Nic(), Nic()]
    pairs = {(s, t): QueuePair(LINK, sources[s], targets[t]) for s in (0, 1) for t in (0, 1)}
    delivered: dict[tuple[int, int], list[float]] = {key: [] for key in pairs}
    into: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    for nbytes, at_s, s, t in sorted(posts, key=lambda post: post[1]):
        sent = pairs[s, t].post([nbytes], at_s)[0]
        assert sent.delivered_s - at_s >= LINK.one_way_s(nbytes) - 1e-12
        delivered[s, t].append(sent.delivered_s)
        into[t].append((nbytes, sent.delivered_s))
    for moments in delivered.values():
        assert moments == sorted(moments)
    for arrivals in into.values():
        for (_, before_s), (nbytes, after_s) in pairwise(arrivals):
            assert after_s - before_s >= LINK.busy_s(nbytes) - 1e-12


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
