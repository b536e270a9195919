"""What an index of packages shows of plait: README.md, whose links into this repository would lead nowhere there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*")
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def for_an_index(text: str, source: str | None) -> str:
    """Return a document of this repository with absolute links below `source`, or without them, and no images."""
    link = rf"[\1]({source}/blob/main/\2)" if source else r"\1"
    return _LINK.sub(link, _IMAGE.sub("", text))


class CustomMetadataHook(MetadataHookInterface):
    """Hatchling makes the wheel's metadata with it. `urls.Source` is the address of the repository, once it has one."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        said = for_an_index(text, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": said}
