"""`plait models`: list what a configuration offers, verify its quality, make models and updates of them; package your
own recommendation models, and show where they are cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from plait.errors import PlaitError, told, write
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.random_models import DtypeName, LoraSpelling

USUAL_RANK = 16
_MB = 1_000_000

# Enough to see that nothing is broken, within a minute on two cores.
QUICK_CONCEPTS = 20

Config = Annotated[Path | None, typer.Option(help="plait.yaml; without one the starter models")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Package = Annotated[Path, typer.Argument(help="the packaged model's folder")]
Out = Annotated[Path, typer.Option("-o", "--out", help="the folder to make; it must not exist yet")]
Cutter = Literal["mincut", "prism"]
Bags = Annotated[
    list[str] | None, typer.Option("--bag", metavar="NAME=IDS", help="ids in a typical row of a bag; may be repeated")
]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def models() -> None:
    """Base models, ControlNets, LoRAs and recommendation models."""


@app.command("list")
def list_models(config: Config = None, as_json: AsJson = False) -> None:
    """List the names that requests may use, read from the folders without loading any model."""
    from plait.config import load_config
    from plait.offline.inventory import inventory
    from plait_serving.diffusion.sources.names import shown

    loaded = load_config(config)
    entries = [asdict(entry) for entry in inventory(loaded.images, loaded.ranking_models)]
    if as_json:
        print(json.dumps(entries, indent=1))
    else:
        columns = ("name", "kind", "family", "format", "folder")
        rows = [{**entry, "folder": shown(entry["folder"])} for entry in entries]
        print(table([columns, *[[row[column] for column in columns] for row in rows]]))


@app.command("check")
def check_model(
    model: Annotated[str, typer.Argument(help="a name of `plait models list`, or a model's folder or file")],
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Check one model as `plait doctor` checks all: what it is, whether it is whole and safe to load.

    Exit with code 1 on a problem; no weights are loaded.
    """
    from plait.config import load_config
    from plait.doctor.findings import CheckStatus, listed
    from plait.doctor.models import check_model

    found = list(check_model(load_config(config), model))
    print(listed(found, as_json=as_json))
    raise typer.Exit(1 if any(each.verdict is CheckStatus.FAIL for each in found) else 0)


@app.command("verify")
def verify_models(
    part: Annotated[
        list[str] | None, typer.Option(help="only this: recognition, edges, colors, noto, sketch, pixel; repeatable")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="a folder laid out as the starter's; its own if left out")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_CONCEPTS} concepts: a look, no verdict")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the starter models with the server's own engine. Exit with code 99 if a figure misses its threshold."""
    from plait.offline.images import open_local
    from plait.offline.verification import check_files, measure, parse_parts, section_of
    from plait_serving.starter.manifest import WEIGHTS

    folder = folder or WEIGHTS
    with told(ValueError, to=lambda said: typer.BadParameter(said, param_hint="--part")):
        parts = parse_parts(part)
    check_files(folder)
    limit = QUICK_CONCEPTS if quick else None
    print(f"loading {folder} ...", file=sys.stderr, flush=True)
    with open_local(section_of(folder)) as service:
        report = measure(service, folder, parts=parts, limit=limit, say=_say)
    print(json.dumps(report, indent=1) if as_json else figures_table(report["figures"]))
    if not report["passed"]:
        raise typer.Exit(99)


@app.command("merge")
def merge_loras(
    base: Annotated[str, typer.Argument(help="a model of the configuration, a diffusers folder, or owner/name@commit")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="an empty or new folder")],
    lora: Annotated[
        list[str],
        typer.Option(metavar="NAME[:SCALE]", help="of the configuration, or a .safetensors file; may be repeated"),
    ],
    config: Config = None,
) -> None:
    """Write a base model with LoRAs in its weights: for who always wants them, at no cost in any step.

    The folder has the dtype of the model's files, and everything that the LoRAs leave alone as it is.
    """
    from plait.config import load_config
    from plait.offline.images import named
    from plait.offline.merging import check_merge, merge
    from plait_serving.diffusion.sources.staging import require_new_folder

    images = load_config(config).images
    if images is None:
        raise PlaitError("the configuration says images: null; there is nothing to merge into")
    require_new_folder(out)
    scales = {it["name"]: it.get("scale", 1.0) for it in (named(text, "--lora") for text in lora)}
    if len(scales) < len(lora):
        raise typer.BadParameter("names a LoRA twice", param_hint="--lora")
    chosen = check_merge(images, base, scales)
    print("loading the model classes ...", file=sys.stderr, flush=True)
    for part in merge(images, chosen, scales, out):
        rounded = f"rounded to {part.dtype} (at most {part.tolerance:.1e} of each)"
        print(f"{part.component}: {part.changed} of {part.weights} weights changed, {rounded}", file=sys.stderr)
    print(f"serve it: images: {{model: {out.absolute()}}} in plait.yaml", file=sys.stderr)
    print(out)


@app.command("random")
def random_model(
    family: Annotated[FamilyName, typer.Argument(help="the architecture; with --lora, what the LoRA is for")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="an empty or new folder; with --lora, a new .safetensors")],
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same bytes")] = 0,
    dtype: Annotated[DtypeName, typer.Option(help="how weights are stored")] = DtypeName.FLOAT16,
    lora: Annotated[LoraSpelling | None, typer.Option(help="write a LoRA with these layers and names")] = None,
    rank: Annotated[int | None, typer.Option(min=1, max=4096, help=f"the LoRA's; {USUAL_RANK} if left out")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="the same blocks, but few and narrow: a few megabytes")] = False,
    no_t5: Annotated[bool, typer.Option("--no-t5", help="leave out the largest encoder of sd3.5, as one may")] = False,
) -> None:
    """Write a published architecture with random weights: what it costs to serve can be measured, its images are noise.

    The folder is a diffusers folder with its tokenizers. ControlNets guide the base of their name: sd15 or sdxl.
    """
    if lora is None and rank is not None:
        raise typer.BadParameter("is for --lora only", param_hint="--rank")
    if lora is not None and out.suffix != ".safetensors":
        raise typer.BadParameter(f"{out} is no .safetensors file", param_hint="--out")
    if lora is not None and family.value.endswith("controlnet"):
        raise typer.BadParameter("a LoRA is for a base model, not for a ControlNet", param_hint="--lora")
    from plait_serving.diffusion.sources.staging import require_new_file, require_new_folder

    (require_new_folder if lora is None else require_new_file)(out)  # before the libraries are loaded
    print("loading the model classes ...", file=sys.stderr, flush=True)
    from plait_serving.diffusion.published.architectures import ARCHITECTURES
    from plait_serving.diffusion.published.scaled import scaled_down
    from plait_serving.random_models.loras import write_lora
    from plait_serving.random_models.write import write_model

    architecture, report = scaled_down(family) if tiny else ARCHITECTURES[family], _progress()
    if no_t5:
        architecture = architecture.without_t5()
    with told(file=out):
        if lora is None:
            write_model(architecture, out, seed=seed, dtype=dtype, report=report)
        else:
            rank = rank or USUAL_RANK
            write_lora(architecture, out, spelling=lora, rank=rank, seed=seed, dtype=dtype, report=report)
    key = f"loras: {{folder: {out.absolute().parent}}}" if lora else f"model: {out.absolute()}"
    if not family.value.endswith("controlnet"):
        print(f"serve it: images: {{{key}}} in plait.yaml", file=sys.stderr)
    print(out)


@app.command("package")
def package_model(
    target: Annotated[
        str,
        typer.Argument(
            help="module:function or file.py:function; it returns (module, inputs) or (module, inputs, items)"
        ),
    ],
    *,
    out: Out,
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


@app.command("explain")
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


@app.command("cut")
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
    as_json: AsJson = False,
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


@app.command("update")
def make_update(
    package: Package,
    target: Annotated[
        str, typer.Argument(help="module:function or file.py:function; as for `package`, with the new weights")
    ],
    *,
    out: Out,
    version: Annotated[str, typer.Option(help="the new version")],
) -> None:
    """Write an update: the rows and weights in which a retrained model differs from the newest version."""
    from plait.offline.packaging import make, update

    print(f"making {target} ...", file=sys.stderr, flush=True)
    manifest = update(make(target, out=out).module, package, out, version=version)
    print(f"from version {manifest.base}: rows of {len(manifest.rows)} tables, {len(manifest.constants)} weights",
          file=sys.stderr)  # fmt: skip
    print(out)


@app.command("refresh")
def refresh_model(
    model: Annotated[str, typer.Argument(help="what requests call the model")],
    update: Annotated[Path, typer.Argument(help="the update's folder, where the server's machine sees it too")],
    *,
    url: Annotated[str, typer.Option(help="the running server")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="PLAIT_API_KEY", help="a key with the role admin")] = None,
) -> None:
    """Publish an update to a running server. No request is lost, and none sees a mix of two versions.

    A bad update is refused, and the old version stays. Publishing the same update again is not an error.
    """
    from plait.offline.packaging import publish_over_http

    version = publish_over_http(url, model, update, api_key=api_key)
    print(f"{model} is at version {version}")


@app.command("fold")
def fold_model(package: Package, *, out: Out) -> None:
    """Write a package with its updates folded in; many small updates make every worker start slower."""
    from plait.offline.packaging import fold

    print(f"version {fold(package, out).version}", file=sys.stderr)
    print(out)


def _progress() -> Callable[[str, int, int], None]:
    """Return what prints progress: one line that overwrites itself on a terminal, else a line for every tenth."""
    shown: tuple[str, int] | None = None
    on_terminal = sys.stderr.isatty()
    begin = "\r\x1b[K" if on_terminal else ""

    def report(name: str, written: int, total: int) -> None:
        nonlocal shown
        if (state := (name, (100 if on_terminal else 10) * written // total)) != shown:
            shown = state
            end = "" if on_terminal and written < total else "\n"
            line = f"{begin}{name}: {written / _MB:,.0f} of {total / _MB:,.0f} MB"
            print(line, end=end, file=sys.stderr, flush=True)

    return report


def _bags(texts: list[str] | None) -> dict[str, int]:
    """Parse the `NAME=IDS` options."""
    bags: dict[str, int] = {}
    for text in texts or ():
        name, equals, count = text.partition("=")
        if not equals or not name or not count.isascii() or not count.isdigit() or not 0 < int(count) <= 1_000_000:
            raise typer.BadParameter(f"{text!r} is not NAME=IDS", param_hint="--bag")
        bags[name] = int(count)
    return bags


def _say(made: int, asked: int) -> None:
    """Print a progress line that overwrites itself; if stderr is not a terminal, print one for every 50th image."""
    begin, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
    if begin or made % 50 == 0:
        print(f"{begin}{made}/{asked} images", end=end, file=sys.stderr, flush=True)


def figures_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per figure: its value, its threshold, and whether it passes."""
    rows = [("figure", "value", "wanted", "images", "")]
    for it in figures:
        wanted, verdict = f"{it['bound']} {it['threshold']:g}", "ok" if it["passed"] else "MISSED"
        rows.append((it["name"], f"{it['value']:.3f}", wanted, str(it["count"]), verdict))
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
