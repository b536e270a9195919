"""From what a configuration calls a model to its folder: a folder, a checkpoint in one file, or a hub id."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.settings import cache_folder
from plait_serving.diffusion.sources.file_kinds import stem_of, why_unread


def resolve_source(
    source: str | Path, revision: str | None = None, *, config: Path | None = None, cache: Path | None = None
) -> Path:
    """Return the folder that `source` names: a file is converted the first time, a hub id is downloaded. Raises
    `ModelError`.

    `config`: the folder that a file's configurations and tokenizers are in, if they are not the published ones; `cache`
    keeps what is converted.
    """
    place = Path(expanduser(source))
    if place.is_dir():
        return place
    if (why := why_unread(place.name)) is not None:
        raise ModelError(f"{source}: {why}")
    if stem_of(place.name) is not None:
        from plait_serving.diffusion.sources.single_file import converted

        return converted(place, config=config, cache=(cache or cache_folder()) / "converted")
    parts = str(source).split("/")
    if isinstance(source, Path) or len(parts) != 2 or not all(parts) or str(source).startswith((".", "~")):
        raise ModelError(f"{source}: no such folder")
    if revision is None:
        raise ModelError(f"{source}: not a folder here; as a hub id it needs a revision (a commit's 40 hex digits)")
    from plait_serving.diffusion.sources import hub

    return hub.fetch_from_hub(str(source), revision)
