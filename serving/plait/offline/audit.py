"""What audits of compiled models kept: drifts, each with both answers, as a list and as a page to look at."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import PlaitError, told
from plait_report.page import header, html_page, section

if TYPE_CHECKING:
    import torch

_SHOWN_EDGE = 256
_FACTS = ("program", "date", "share_of_tolerance", "tolerance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One answer that differed from torch's. `file` holds the call's inputs and both answers."""

    program: str
    date: str
    share_of_tolerance: str
    tolerance: str
    file: str


def drifts(folder: Path) -> list[Drift]:
    """Return what is kept in a folder, oldest first; none if there is no such folder. Raises `PlaitError`."""
    from safetensors import SafetensorError, safe_open

    found: list[Drift] = []
    for path in sorted(folder.glob("*.safetensors")):
        with told(OSError, SafetensorError, about=f"{path}: not readable"), safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
        if any(name not in facts for name in _FACTS):
            raise PlaitError(f"{path}: not what an audit kept")
        found.append(Drift(**{name: facts[name] for name in _FACTS}, file=str(path)))
    return found


def page(found: Sequence[Drift]) -> str:
    """Return an HTML document with the last answer of every drift beside torch's, and where they differ."""
    leads = () if found else ("Nothing is kept: no audited answer has differed.",)
    head = header(("plait audit",), ("", "Where compiled models differed from torch"), leads)
    parts = [
        section(
            drift.program,
            f"{drift.date}: {drift.share_of_tolerance} times the tolerance of {drift.tolerance}. {drift.file}",
            f'<div class="slices">{_images(Path(drift.file))}</div>',
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
