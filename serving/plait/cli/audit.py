"""`plait audit`: where a compiled model differed from torch, with both answers, as a list and as a page to look at."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.errors import PlaitError, told, write
from plait_report.page import header, html_page, section

if TYPE_CHECKING:
    import torch

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)
_SHOWN_EDGE = 256
_FACTS = ("program", "date", "share_of_tolerance", "tolerance")
"""What is told of each answer that differed, beside the `file` with the call's inputs and both answers."""


@app.callback()
def audit() -> None:
    """Read what audits kept: a server computes sampled answers of its compiled models again with torch."""


@app.command()
def show(
    folder: Annotated[Path | None, typer.Option(help="what audits kept; in the user's cache if left out")] = None,
    out: Annotated[Path | None, typer.Option(help="write a page with the pairs of answers to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """List the answers that differed. Exit with code 1 if there are any."""
    if folder is not None and not folder.is_dir():
        raise PlaitError(f"{folder}: there is no such folder")
    from plait_serving.diffusion.families.preparation import audit_folder
    from plait_serving.diffusion.settings import default_prepared_folder

    found = drifts(folder or audit_folder(default_prepared_folder()))
    if out is not None:
        write(out, page(found))
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        for drift in found:
            print("{date}  {program:<24} {share_of_tolerance:>8} x tolerance  {file}".format_map(drift))
        if not found:
            print("no audited answer has differed")
    raise typer.Exit(1 if found else 0)


def drifts(folder: Path) -> list[dict[str, str]]:
    """Return what is kept in a folder, oldest first; none if there is no such folder. Raises `PlaitError`."""
    from safetensors import SafetensorError, safe_open

    found: list[dict[str, str]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with told(OSError, SafetensorError, about=f"{path}: not readable"), safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
        if any(name not in facts for name in _FACTS):
            raise PlaitError(f"{path}: not what an audit kept")
        found.append({name: facts[name] for name in _FACTS} | {"file": str(path)})
    return found


def page(found: Sequence[dict[str, str]]) -> str:
    """Return an HTML document with the last answer of every drift beside torch's, and where they differ."""
    leads = () if found else ("Nothing is kept: no audited answer has differed.",)
    head = header(("plait audit",), ("", "Where compiled models differed from torch"), leads)
    parts = [
        section(
            drift["program"],
            "{date}: {share_of_tolerance} times the tolerance of {tolerance}. {file}".format_map(drift),
            f'<div class="slices">{_images(Path(drift["file"]))}</div>',
        )
        for drift in found
    ]
    return html_page("plait audit", [head, *parts])


def _images(path: Path) -> str:
    """Return the last answer, torch's, and the difference, as figures; its first row and up to three channels."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    last = max(int(name.removeprefix("answer.")) for name in tensors if name.startswith("answer."))
    answer, wanted = (_channels(tensors[f"{kind}.{last}"]) for kind in ("answer", "torch"))
    low, high = float(wanted.min()), float(wanted.max())
    difference = (answer - wanted).abs()
    shown = {
        "compiled": _scaled(answer, low, high),
        "torch": _scaled(wanted, low, high),
        f"difference (white: {float(difference.max()):.3g})": _scaled(difference, 0.0, float(difference.max())),
    }
    return "".join(
        f'<figure><img alt="{escape(what)}" width="{_SHOWN_EDGE}" src="{_data_uri(image)}">'
        f"<figcaption>{escape(what)}</figcaption></figure>"
        for what, image in shown.items()
    )


def _channels(value: torch.Tensor) -> torch.Tensor:
    """Return `float32 (3, h, w)` or `(1, h, w)` of a tensor of any shape: channels of an image, else a flat strip."""
    value = value[0].float().nan_to_num(0.0, 0.0, 0.0)
    if value.dim() != 3:
        value = value.reshape(1, 1, -1) if value.dim() < 2 else value.flatten(0, -2)[None]
    return value[:3] if len(value) >= 3 else value[:1]


def _scaled(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ((value - low) / max(high - low, 1e-12)).clamp(0.0, 1.0)


def _data_uri(image: torch.Tensor) -> str:
    from plait_serving.images.codec import OutputFormat, encode_image

    pixels = (image * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).contiguous()
    return f"data:image/png;base64,{base64.b64encode(encode_image(pixels.numpy(), OutputFormat.PNG)).decode()}"
