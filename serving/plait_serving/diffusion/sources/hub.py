"""Downloads of models from the Hugging Face hub. All calls to the hub are made here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from plait_serving.diffusion.errors import ModelError

_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_WEIGHTS = re.compile(
    r"^(?P<stem>.*?(?:diffusion_pytorch_model|model))(?:\.(?P<variant>[a-z0-9_]+))?(?P<shard>-\d+-of-\d+)?\.safetensors$"
)
_DESCRIPTIONS = (".json", ".txt", ".model")


def fetch_from_hub(repository: str, revision: str) -> Path:
    """Return the local folder of `repository` at commit `revision`; an existing snapshot needs no network.

    Takes descriptions and one set of safetensors weights per part, never pickles. Raises `ModelError`.
    """
    if not _COMMIT.match(revision):
        raise ModelError(f"{repository}: revision {revision!r} is not a commit's 40 hex digits; branches and tags move")
    try:
        files = HfApi().list_repo_files(repository, revision=revision)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted_files(files)))
    except Exception as error:  # the client of the hub lets its transport's own errors through
        try:  # an earlier download is as good when there is no network: a commit never changes
            return Path(snapshot_download(repository, revision=revision, local_files_only=True))
        except (LocalEntryNotFoundError, OSError):
            raise ModelError(f"{repository}@{revision}: cannot be downloaded: {error}") from error


def wanted_files(files: Iterable[str]) -> list[str]:
    """Select descriptions and, per folder, the plain safetensors or else one variant of them."""
    names = list(files)
    wanted = [name for name in names if name.endswith(_DESCRIPTIONS)]
    weights: dict[str, dict[str, list[str]]] = {}
    for name in names:
        match = _WEIGHTS.match(name)
        # Weights at the top level are whole-pipeline checkpoints, except in a ControlNet's repository.
        if match and ("/" in name or match["stem"] == "diffusion_pytorch_model"):
            weights.setdefault(match["stem"], {}).setdefault(match["variant"] or "", []).append(name)
    for variants in weights.values():
        wanted += variants[min(variants)]
    return sorted(wanted)
