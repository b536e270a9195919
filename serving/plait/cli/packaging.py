"""`plait models package` and `plait models cut`: package your own recommendation models, and show where they are
cut."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from plait.errors import write

Cutter = Literal["mincut", "prism"]
Bags = Annotated[
    list[str] | None, typer.Option("--bag", metavar="NAME=IDS", help="ids in a typical row of a bag; may be repeated")
]


def package_model(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function or file.py:function; it returns (module, inputs) or (module, inputs, items)"
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="the folder to make; it must not exist yet")],
    name: Annotated[
        str | None, typer.Option(help="what requests call the model; the folder's name if left out")
    ] = None,
    version: Annotated[str, typer.Option(help="the model's version")] = "1",
    row_format: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="how rows of tables are stored")
    ] = "float32",
    candidates: Annotated[int, typer.Option(min=1, max=10_000, help="the request that the cut is made for")] = 64,
    cutter: Annotated[Cutter, typer.Option(help="the exact minimum, or Prism's colouring")] = "mincut",
    bag: Bags = None,
    tile: Annotated[bool, typer.Option("--tile/--no-tile", help="compute the user's side once per request")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print package.json")] = False,
) -> None:
    """Capture a PyTorch model, cut it in two, and write the folder that `plait serve` serves.

    The function is your code and runs here. Its result is stored as programs and numbers: serving runs none of your
    code.
    """
    from plait.offline.packaging import advised, make, package
    from plait_disagg.package.manifest import MANIFEST
    from plait_disagg.package.write import PackageOptions

    options = PackageOptions(
        version=version, row_format=row_format, cutter=cutter, tile=tile, candidates=candidates, ids_per_bag=_bags(bag)
    )
    print(f"making {target} ...", file=sys.stderr, flush=True)
    made = make(target, out=out)
    print("capturing and cutting ...", file=sys.stderr, flush=True)
    manifest = package(made, out, name=name or out.name, options=options)
    for sentence in advised(out, options):
        print(f"note: {sentence}", file=sys.stderr)
    print(f"serve it: recommend: {{models: {{{manifest.name}: {{folder: {out}}}}}}} in plait.yaml", file=sys.stderr)
    print((out / MANIFEST).read_text(encoding="utf-8") if as_json else out, end="" if as_json else "\n")


def explain_model(
    target: Annotated[str, typer.Argument(help="module:function or file.py:function, as for package")],
) -> None:
    """List all that keeps a model from being packaged, with the line of each operator and what to write instead.

    Exits with 1 if there is anything.
    """
    from plait.offline.packaging import explain, make

    found = explain(make(target))
    for number, refused in enumerate(found, start=1):
        print(f"{number}. {refused}")
    if found:
        raise typer.Exit(1)
    print("nothing keeps it from being packaged")


def cut_model(
    model: Annotated[
        str, typer.Argument(help="a packaged model's folder, or a configuration: rm1, rm2, criteo-kaggle, ...")
    ],
    *,
    cutter: Annotated[Cutter | None, typer.Option(help="cut it again; as it was packaged if left out")] = None,
    candidates: Annotated[int, typer.Option(min=1, max=10_000, help="the request that the cut is made for")] = 64,
    bag: Bags = None,
    shards: Annotated[
        int | None, typer.Option(min=2, max=64, help="show how cn.shards would deal a package's tables")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="draw it into this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show where a model is cut: what runs on which side, which tensors cross, and bytes per request."""
    from plait.offline.packaging import SHOWN, dealt_tables, inspect_cut
    from plait_disagg.graph.svg import cut_svg

    title, report = inspect_cut(model, cutter=cutter, candidates=candidates, ids_per_bag=_bags(bag))
    if svg is not None:
        write(svg, cut_svg(report, title=title, candidates=SHOWN))
        print(f"drawn into {svg}", file=sys.stderr)
    dealt = None if shards is None else dealt_tables(Path(model), shards)
    if as_json:
        more = {} if dealt is None else {"shards": dealt}
        print(json.dumps({"title": title, **report.to_json(), **more}, indent=1))
        return
    print(title, report.to_text(), sep="\n", end="")
    for number, shard in enumerate(dealt or ()):
        print(f"shard {number}: {shard['held_bytes']:,} bytes, {shard['read_bytes']:,.0f} read by a request", end="")
        print(f": {', '.join(shard['pieces']) or 'nothing'}")


def _bags(texts: list[str] | None) -> dict[str, int]:
    """Parse the `NAME=IDS` options."""
    bags: dict[str, int] = {}
    for text in texts or ():
        name, equals, count = text.partition("=")
        if not equals or not name or not count.isascii() or not count.isdigit() or not 0 < int(count) <= 1_000_000:
            raise typer.BadParameter(f"{text!r} is not NAME=IDS", param_hint="--bag")
        bags[name] = int(count)
    return bags
