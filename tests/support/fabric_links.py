"""Links and measurements for tests of the link model."""

from __future__ import annotations

from dataclasses import replace

from plait_fabric.link.link import Link
from plait_fabric.link.link_files import LINKS, SourcedLink, read_links


def shipped(name: str = "100g-same-switch") -> SourcedLink:
    """A link of the file that ships."""
    return read_links(LINKS)[name]


def slow_link(*, alpha_s: float = 2e-3, bytes_per_s: float = 1e9) -> Link:
    """A link that every host outruns."""
    return replace(
        shipped().link,
        name="slow",
        alpha_s=alpha_s,
        bytes_per_s=bytes_per_s,
        small_bytes=0,
        inline_bytes=0,
        small_s_per_byte=1 / bytes_per_s,
    )


def send_lat(link: Link, sizes: tuple[int, ...] = (2, 16, 64, 256, 1024, 4096, 16_384, 65_536, 1 << 20)) -> str:
    """What ib_send_lat prints for a link, to the two decimals that it prints."""
    lines = [
        f" {n:<8}1000      0.70      9.00     {link.one_way_s(n) * 1e6:.2f}   2.00   0.10   3.00   4.00" for n in sizes
    ]
    return _perftest(
        "Send Latency Test",
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]"
        "   99% percentile[usec]   99.9% percentile[usec] ",
        lines,
        link.inline_bytes,
    )


def write_bw(link: Link, sizes: tuple[int, ...] = (2, 4096, 65_536, 1 << 20)) -> str:
    """What ib_write_bw prints for a link, in its own MB."""
    lines = []
    for n in sizes:
        rate_per_s = 1 / link.busy_s(n)
        lines.append(
            f" {n:<10} 5000             0.00               {n * rate_per_s / 2**20:.2f}		   {rate_per_s / 1e6:.6f}"
        )
    head = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]"
    return _perftest("RDMA_Write BW Test", head, lines, 0)


def _perftest(title: str, head: str, lines: list[str], inline_bytes: int) -> str:
    rule = "-" * 87
    facts = [
        " Dual-port       : OFF		Device         : mlx5_0",
        " Number of qps   : 1		Transport type : IB",
        " Connection type : RC		Using SRQ      : OFF",
        " Mtu             : 4096[B]",
        *([f" Max inline data : {inline_bytes}[B]"] if inline_bytes else []),
        " local address: LID 0x05 QPN 0x0123 PSN 0xabcdef",
    ]
    return "\n".join([rule, f"                    {title}", *facts, rule, head, *lines, rule, ""])
