"""`plait models random`: models of real size without a download."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from plait_serving.random_models.names import DtypeName, FamilyName, LoraSpelling

USUAL_RANK = 16
_MB = 1_000_000


def random_model(
    family: Annotated[FamilyName, typer.Argument(help="the architecture; with --lora, what the LoRA is for")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="an empty or new folder; with --lora, a new .safetensors")],
    seed: Annotated[int, typer.Option(min=0, help="the same seed gives the same bytes")] = 0,
    dtype: Annotated[DtypeName, typer.Option(help="how weights are stored")] = DtypeName.FLOAT16,
    lora: Annotated[LoraSpelling | None, typer.Option(help="write a LoRA with these layers and names")] = None,
    rank: Annotated[int | None, typer.Option(min=1, max=4096, help=f"the LoRA's; {USUAL_RANK} if left out")] = None,
) -> None:
    """Write a published architecture with random weights: what it costs to serve can be measured, its images are noise.

    The folder is a diffusers folder with a tokenizer. ControlNets guide the base of their name: sd15 or sdxl.
    """
    if lora is None and rank is not None:
        raise typer.BadParameter("is for --lora only", param_hint="--rank")
    if lora is not None and out.suffix != ".safetensors":
        raise typer.BadParameter(f"{out} is no .safetensors file", param_hint="--out")
    if lora is not None and family.value.endswith("controlnet"):
        raise typer.BadParameter("a LoRA is for a base model, not for a ControlNet", param_hint="--lora")
    _require_new(out, file=lora is not None)
    print("loading the model classes ...", file=sys.stderr, flush=True)
    from plait.offline.random_models import RandomLora, write

    wanted = None if lora is None else RandomLora(spelling=lora, rank=rank or USUAL_RANK)
    write(family, out, seed=seed, dtype=dtype, lora=wanted, report=_progress())
    key = f"loras: {{folder: {out.absolute().parent}}}" if lora else f"model: {out.absolute()}"
    if not family.value.endswith("controlnet"):
        print(f"serve it: images: {{{key}}} in plait.yaml", file=sys.stderr)
    print(out)


def _require_new(out: Path, *, file: bool) -> None:
    """Refuse what is there already, before the libraries are loaded."""
    from plait_serving.diffusion.sources.staging import require_new_file, require_new_folder

    (require_new_file if file else require_new_folder)(out)


def _progress() -> Callable[[str, int, int], None]:
    """Return what prints progress: one line that overwrites itself on a terminal, else a line for every tenth."""
    shown: tuple[str, int] | None = None
    on_terminal = sys.stderr.isatty()

    def report(name: str, written: int, total: int) -> None:
        nonlocal shown
        state = (name, (100 if on_terminal else 10) * written // total)
        if state == shown:
            return
        shown = state
        line = f"{name}: {written / _MB:,.0f} of {total / _MB:,.0f} MB"
        if on_terminal:
            print(f"\r\x1b[K{line}", end="\n" if written == total else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    return report
