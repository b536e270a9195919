"""`plait links`: the RDMA link models that ship with plait, and new ones fitted to measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from plait.errors import PlaitError, told, write

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def links() -> None:
    """Models of RDMA links, for delayed channels and for simulations. All their figures are modelled."""


@app.command("list")
def list_links(
    file: Annotated[Path | None, typer.Argument(help="a file of links; plait's own if left out")] = None,
) -> None:
    """Show the one-way times of each link."""
    from plait.cli.models import table
    from plait_fabric.link.link_files import LINKS, read_links

    sizes = {"32 B": 32, "4 KiB": 4_096, "64 KiB": 65_536, "1 MiB": 1 << 20}
    rows = [("link", *(f"{name}, us" for name in sizes), "GB/s")]
    file = file or LINKS
    with told(OSError, ValueError, about=file):
        known = read_links(file)
    for name, one in known.items():
        times = [f"{1e6 * one.link.one_way_s(nbytes):.2f}" for nbytes in sizes.values()]
        rows.append((name, *times, f"{one.link.bytes_per_s / 1e9:.1f}"))
    print(table(rows))


@app.command("calibrate")
def calibrate_link(
    measurements: Annotated[
        list[Path], typer.Argument(help="output of ib_send_lat, ib_write_lat, ib_send_bw, ib_write_bw, or a CSV")
    ],
    *,
    name: Annotated[str, typer.Option(help="what to call the link")] = "measured",
    like: Annotated[
        str, typer.Option(help="the link whose values stand for what was not measured")
    ] = "100g-same-switch",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="the file to write; stdout if left out")] = None,
) -> None:
    """Fit a link model to measurements of one kind of link, and write a links file that contains it."""
    from plait_fabric.link.calibrate import calibrate, fit_error, parse_measurements
    from plait_fabric.link.link_files import LINKS, links_document, read_links

    known = read_links(LINKS)
    if like not in known:
        raise PlaitError(f"there is no link {like!r}; there are {', '.join(known)}")
    found = []
    for path in measurements:
        with told(OSError, ValueError, about=path):
            found.append(parse_measurements(path.read_text(encoding="utf-8-sig")))
    with told(ValueError):
        one = calibrate(name, found, known[like], source=", ".join(path.name for path in measurements))
    latencies = [(s.nbytes, s.latency_s) for measured in found for s in measured.samples if s.latency_s is not None]
    worst, nbytes = fit_error(one.link, latencies)
    if latencies:
        print(f"{name}: at worst {worst:.1%} off, at {nbytes} bytes", file=sys.stderr)
    text = links_document({name: one})
    if out is None:
        print(text, end="")
    else:
        write(out, text)
