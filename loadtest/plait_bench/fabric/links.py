"""Whether a modelled link keeps its own time: ping-pongs over it in real time, against its formula.

Runs over shared memory with leases, whose cost to the host is the same at all sizes. Half a round trip should be the
modelled one-way time wherever that exceeds what the host needs; where it does not, the messages report that the host
is slower, and so does the row.
"""

from __future__ import annotations

from collections.abc import Mapping

from plait_bench.benchmark import Reading, Workload, percentile, readings
from plait_bench.fabric.peer import bounce, channel_to, ping_pong
from plait_fabric.link.link import Link
from plait_fabric.link.link_files import LINKS, read_links

SIZES_BYTES = {"64B": 64, "1MiB": 1 << 20, "4MiB": 1 << 22, "16MiB": 1 << 24, "64MiB": 1 << 26}
FAR = "10g-far"
"""A link that does not ship: 10 Gb/s and 1 ms away, so that it exceeds the overhead of a host at all sizes."""
_LINKS = ("100g-same-switch", "100g-cross-pod", FAR)
_SECONDS, _MIN_TRIPS, _MAX_TRIPS = 0.4, 11, 400


class ModelledLinks(Workload):
    """Every link and size: the median of a run, and the model's prediction."""

    name = "modelled-links"
    systems = ("plait", "model")
    metrics: Mapping[str, str] = {"one_way_us": "us"}

    def take(self, system: str, number: int) -> list[Reading]:
        """Measure all links, or compute them."""
        links = known_links()
        one = _modelled if system == "model" else _measured
        return [reading for name in _LINKS for reading in one(name, links[name])]


def known_links() -> dict[str, Link]:
    """Read the links that ship, and add `FAR`."""
    links = {name: sourced.link for name, sourced in read_links(LINKS).items()}
    near = links["100g-same-switch"]
    far = near.with_values(FAR, alpha_s=1e-3, wire_s=1e-3, bytes_per_s=1.22e9, small_s_per_byte=1 / 1.22e9)
    return links | {FAR: far}


def _modelled(name: str, link: Link) -> list[Reading]:
    """Return the values of the link's formula."""
    return [
        Reading(workload=f"{name}-{size}", metric="one_way_us", value=link.one_way_s(nbytes) * 1e6, kind="modelled")
        for size, nbytes in SIZES_BYTES.items()
    ]


def _measured(name: str, link: Link) -> list[Reading]:
    """Measure a channel over the link."""
    found: list[Reading] = []
    with channel_to(bounce, link=link) as (channel, _):
        for size, nbytes in SIZES_BYTES.items():
            taken_s, late = ping_pong(channel, nbytes, seconds=_SECONDS, least=_MIN_TRIPS, most=_MAX_TRIPS)
            one_way_us, share = percentile(taken_s, 0.5) / 2 * 1e6, late / (len(taken_s) + 1)
            remark = f"host slower in {share:.0%}" if late else ""
            found += readings({"one_way_us": one_way_us}, workload=f"{name}-{size}", layout=remark)
    return found
