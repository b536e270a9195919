"""`plait models merge`: a base model with LoRAs in its weights, as a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from plait.doctor.findings import CheckStatus
from plait.doctor.models import check_base
from plait.errors import PlaitError, told
from plait.offline.inventory import lora_names
from plait_serving.diffusion.sources.file_kinds import stem_of
from plait_serving.diffusion.sources.names import composed
from plait_serving.images.config import BaseSource, ImagesSection
from plait_serving.spelling import hint

if TYPE_CHECKING:
    from plait_serving.diffusion.lora.merged_folder import MergedPart


def check_merge(images: ImagesSection, base: str, loras: Mapping[str, float]) -> BaseSource:
    """Return the base model, if names and directories tell that it and the LoRAs are there; without torch. Raises
    `PlaitError`.

    `base`: a model of the configuration, a folder, or a hub id with its commit; a LoRA: a name of the configuration, or
    a file.
    """
    chosen = _base(images, base)
    names = lora_names(images)
    for text in loras:
        if stem_of(text) is not None and not Path(expanduser(text)).is_file():
            raise PlaitError(f"--lora: {text}: there is no such file")
        if stem_of(text) is None and composed(text) not in names:
            raise PlaitError(f"there is no LoRA named {text!r}{hint(text, names)}")
    if len({_name(text) for text in loras}) < len(loras):
        raise PlaitError("two of the LoRAs have one name")
    return chosen


def merge(images: ImagesSection, base: BaseSource, loras: Mapping[str, float], out: Path) -> Sequence[MergedPart]:
    """Merge LoRAs into a base model that `check_merge` returned, in the order given. Raises `PlaitError` or
    `EngineError`."""
    from plait_serving.deployments.images.hosted import lora_source
    from plait_serving.diffusion.lora.merged_folder import LoraFile, write_merged

    source = lora_source(images)
    with closing(source), told(file=out):
        files = [
            LoraFile(
                name=_name(text),
                path=source.fetch(composed(text)) if stem_of(text) is None else Path(expanduser(text)),
                scale=scale,
            )
            for text, scale in loras.items()
        ]
        return write_merged(base.folder, files, out, revision=base.revision, config=base.config)


def _base(images: ImagesSection, base: str) -> BaseSource:
    if base in images.base_models:
        return images.base_models[base]
    path = Path(expanduser(base))
    is_path = path.exists() or base.startswith((".", "/", "~"))
    chosen = BaseSource.parse(str(path.resolve()) if is_path else base)
    try:
        chosen.check("")
    except ValueError as error:
        raise PlaitError(f"{error}{hint(base, images.base_models)}") from error
    for found in check_base(chosen, "the base model") if is_path else ():
        if found.verdict is CheckStatus.FAIL:
            raise PlaitError(f"{found.detail}; {found.advice}")
    return chosen


def _name(text: str) -> str:
    return text if stem_of(text) is None else Path(text).stem
