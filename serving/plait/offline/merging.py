"""`plait models merge`: a base model with LoRAs in its weights, as a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from plait.errors import PlaitError, told
from plait_serving.deployments.images.hosted import lora_source
from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.lora.merged_folder import LoraFile, MergedPart, write_merged
from plait_serving.diffusion.lora.source import LoraSource
from plait_serving.diffusion.sources.file_kinds import stem_of
from plait_serving.diffusion.sources.names import composed
from plait_serving.images.config import BaseSource, ImagesSection
from plait_serving.spelling import hint


def merge(images: ImagesSection, base: str, loras: Mapping[str, float], out: Path) -> Sequence[MergedPart]:
    """Merge LoRAs into a base model, in the order given. Raises `PlaitError` or `EngineError`.

    `base`: a model of the configuration, a folder, or a hub id with its commit; a LoRA: a name of the configuration, or
    a file.
    """
    chosen = _base(images, base)
    source = lora_source(images)
    with closing(source), told(file=out):
        files = [LoraFile(name=_name(text), path=_file(source, text), scale=scale) for text, scale in loras.items()]
        if len({lora.name for lora in files}) < len(files):
            raise PlaitError("two of the LoRAs have one name")
        return write_merged(chosen.folder, files, out, revision=chosen.revision)


def _base(images: ImagesSection, base: str) -> BaseSource:
    if base in images.base_models:
        return images.base_models[base]
    folder = Path(base).expanduser()
    chosen = BaseSource.parse(str(folder.resolve()) if folder.exists() else base)
    try:
        chosen.check("")
    except ValueError as error:
        raise PlaitError(f"{error}{hint(base, images.base_models)}") from error
    return chosen


def _name(text: str) -> str:
    return text if stem_of(text) is None else Path(text).stem


def _file(source: LoraSource, name: str) -> Path:
    if stem_of(name) is not None:
        return Path(name).expanduser()
    try:
        return source.fetch(composed(name))
    except NotFound as error:
        raise PlaitError(f"{error.message}{hint(name, source.names())}") from error
