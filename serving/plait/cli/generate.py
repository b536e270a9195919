"""`plait generate`: make images without a server and without Ray."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait_serving.images.config import ImagesSection
    from plait_serving.images.service import ImageService

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to draw")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="name.png, .jpg or .webp; n > 1 adds -1, -2, ...")],
    lora: Annotated[list[str] | None, typer.Option(metavar="NAME[:SCALE]", help="may be repeated")] = None,
    controlnet: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:SCALE]=PICTURE", help="may be repeated")
    ] = None,
    preprocess: Annotated[
        bool, typer.Option("--preprocess", help="the PICTUREs are ordinary ones: make control maps of them")
    ] = False,
    image: Annotated[Path | None, typer.Option(help="start from this image")] = None,
    mask: Annotated[
        Path | None,
        typer.Option(help="change only what is transparent in this image, or, if nothing is, what is white"),
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="share of the steps that run: how far to go from --image")
    ] = None,
    negative: Annotated[str | None, typer.Option(help="what not to draw")] = None,
    seed: Annotated[int | None, typer.Option(help="image i uses seed + i; random if left out, or -1")] = None,
    steps: Annotated[int | None, typer.Option(help="denoising steps")] = None,
    guidance: Annotated[float | None, typer.Option(help="guidance scale")] = None,
    true_cfg_scale: Annotated[
        float | None, typer.Option(help="FLUX.1 dev: guidance by --negative; each step takes twice as long")
    ] = None,
    max_sequence_length: Annotated[
        int | None, typer.Option(help="SD3, FLUX.1: the tokens that T5's text is filled up to")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="the sampler, as euler or dpmpp_2m; a wrong one lists all")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="how many images, 1 to 10")] = 1,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT in pixels; the model's own if left out")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="a model or alias of the configuration, a diffusers folder, or a file; its first model if left out"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="plait.yaml with the models to use")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print files, seeds and timings as JSON")] = False,
) -> None:
    """Make images in this process and print the file names; progress goes to stderr."""
    from plait.cli.serve import check_folders
    from plait.config import ServedConfig
    from plait.offline.images import check_order, parse_order, run_order
    from plait_serving.starter.preprocess import PREPROCESSORS

    fields = {
        "prompt": prompt, "negative_prompt": negative, "seed": seed, "num_inference_steps": steps, "n": n,
        "guidance_scale": guidance, "scheduler": scheduler, "size": size, "true_cfg_scale": true_cfg_scale,
        "max_sequence_length": max_sequence_length,
    }  # fmt: skip
    edits = {"image": image, "mask": mask, "strength": strength}
    images, fields["model"] = _images(model, config)
    check_folders(ServedConfig(images=images, recommend=None), source=str(config or "the configuration"))
    order = parse_order(
        fields, edits, output=output, loras=lora or [], controlnets=controlnet or [], preprocess=preprocess
    )
    check_order(order, images)
    with open_service(images) as service:
        made = run_order(order, output, service, preprocessors=PREPROCESSORS, say=_say)
    print(json.dumps(made, indent=1) if as_json else "\n".join(each["file"] for each in made["pictures"]))


def _say(text: str, share: float) -> None:
    """Print a progress line that overwrites itself; print nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r{text}", end="\n" if share >= 1.0 else "", file=sys.stderr, flush=True)


def _images(model: str | None, config: Path | None) -> tuple[ImagesSection, str | None]:
    """Return the section to draw with, and what the request calls the model; a folder is the section's only one."""
    from plait.config import load_config
    from plait.errors import PlaitError
    from plait.offline.inventory import more_models

    images = load_config(config).images
    if images is None:
        raise PlaitError("the configuration says images: null; there is nothing to draw with")
    if model is None or model in (*images.base_models, *images.aliases, *more_models(images)):
        return images, model
    folder = Path(expanduser(model))
    if folder.exists():  # in the working directory, not beside the configuration file
        own: dict[str, Any] = {"model": str(folder.resolve()), "revision": None}
    elif "/" in model:
        own = {"model": model}
    else:
        return images, model
    own |= {"models": None, "name": None, "aliases": {}}  # which are for the configuration's own models
    alone = load_config(config, settings={f"images.{key}": value for key, value in own.items()}).images
    assert alone is not None
    return alone, None


def open_service(images: ImagesSection) -> AbstractContextManager[ImageService]:
    """Open the engine of a configuration in this process."""
    from plait.offline.images import open_local
    from plait.precision import with_dtype

    print(f"loading {images.public_name} ...", file=sys.stderr, flush=True)
    return open_local(with_dtype(images))
