"""Whether a modelled link keeps its own time: ping-pongs over it in real time, against its formula.

Over shared memory with leases, which cost the host the same at all sizes. Half a round trip should be the modelled
one-way time wherever that is more than the host needs; where it is not, the messages say that the host is slower, and
so does the row. A line through the sizes that are not slower gives beta back, and alpha for the link whose alpha a
host can see at all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from plait_bench.fabric.values import PEER_START_S, WAIT_S, RoundValue
from plait_bench.summary import percentile
from plait_fabric import Channel, listen, new_secret
from plait_fabric.link.link import PARAMETERS
from plait_fabric.link.link_files import LINKS, SourcedLink, links_document, read_links
from plait_fabric.link.modelled import modelled
from plait_fabric.testing.peer import spawned_peer

__all__ = ["FAR", "SIZES_BYTES", "WORKLOAD", "take"]

WORKLOAD = "modelled-links"
SIZES_BYTES = {"64B": 64, "1MiB": 1 << 20, "4MiB": 1 << 22, "16MiB": 1 << 24, "64MiB": 1 << 26}
FAR = "10g-far"
"""A link that nobody ships: 10 Gb/s and 1 ms away, so that alpha is more than what a host takes."""
_LINKS = ("100g-same-switch", "100g-cross-pod", FAR)
_SECONDS, _MIN, _MAX = 0.4, 11, 400


def take() -> list[RoundValue]:
    """Every link and size once: the median of a run, what the model says, and alpha and beta through all sizes."""
    links = known_links()
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
        file = Path(folder) / "links.json"
        file.write_text(links_document(links), encoding="utf-8")
        return [one for name in _LINKS for one in _take_link(name, links[name], file)]


def known_links() -> dict[str, SourcedLink]:
    """Those that ship, and `FAR`."""
    links = read_links(LINKS)
    near = links["100g-same-switch"].link
    far = near.with_values(FAR, alpha_s=1e-3, wire_s=1e-3, bytes_per_s=1.22e9, small_s_per_byte=1 / 1.22e9)
    return links | {FAR: SourcedLink(link=far, sources=dict.fromkeys(PARAMETERS, "made for this benchmark"))}


def _take_link(name: str, sourced: SourcedLink, file: Path) -> list[RoundValue]:
    link = sourced.link
    found: list[RoundValue] = []
    in_time: dict[int, float] = {}
    secret = new_secret()
    with (
        tempfile.TemporaryDirectory(prefix="plait-bench-") as folder,
        listen(f"shm://{folder}/socket", secret=secret) as listener,
        spawned_peer("bounce", listener.address, secret, {"links": str(file), "link": name}),
        modelled(listener.accept(PEER_START_S), link) as channel,
    ):
        for size, nbytes in SIZES_BYTES.items():
            one_way_s, late = _one_way_s(channel, nbytes)
            if late < 0.5:
                in_time[nbytes] = one_way_s
            remark = f"host slower in {late:.0%}" if late else ""
            found += _both(f"{name}-{size}", "one_way_us", one_way_s * 1e6, link.one_way_s(nbytes) * 1e6, remark)
    large = {nbytes: one_way_s for nbytes, one_way_s in in_time.items() if nbytes > link.small_bytes}
    if len(large) > 1:
        alpha_s, bytes_per_s = _line(large)
        found += _both(name, "gb_per_s", bytes_per_s / 1e9, link.bytes_per_s / 1e9, "")
        if name == FAR:
            found += _both(name, "alpha_us", alpha_s * 1e6, link.alpha_s * 1e6, "")
    return found


def _both(workload: str, metric: str, ours: float, model: float, remark: str) -> list[RoundValue]:
    return [
        RoundValue(workload=workload, system="plait", metric=metric, value=ours, layout=remark),
        RoundValue(workload=workload, system="model", metric=metric, value=model, kind="modelled"),
    ]


def _one_way_s(channel: Channel, nbytes: int) -> tuple[float, float]:
    """Half the median round trip, and the share of round trips in which a message was late.

    A round trip is from one delivery to the next: what the channel spends between a delivery and the next send is not
    the link's time, and it takes it off that send.
    """
    delivered_s: list[float] = []
    late = 0
    lease = channel.pool.acquire(nbytes)
    until_s = time.perf_counter() + _SECONDS
    while len(delivered_s) < _MIN or (len(delivered_s) < _MAX and time.perf_counter() < until_s):
        channel.send({}, [lease])
        lease = channel.pool.acquire(nbytes)  # for the next one, while this one is under way
        answer = channel.recv(WAIT_S)
        delivered_s.append(time.perf_counter())
        late += answer.delivery.host_slower or bool(answer.header["late"])
        answer.release()
    lease.release()
    taken_s = [after_s - before_s for before_s, after_s in pairwise(delivered_s)]
    return percentile(taken_s, 0.5) / 2, late / len(delivered_s)


def _line(one_way_s: Mapping[int, float]) -> tuple[float, float]:
    """Alpha in seconds and beta in bytes a second, by least squares of relative errors."""
    sizes, times_s = np.array(list(one_way_s)), np.array(list(one_way_s.values()))
    rows = np.stack([np.ones(len(sizes)), sizes / sizes.max()], axis=1) / times_s[:, None]
    alpha_s, largest_s = np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0]
    return float(alpha_s), float(sizes.max() / largest_s)
