"""Requests that start from an image: which of them do, and the fields that this adds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from plait_loadtest.distributions import Floats
from plait_loadtest.errors import ScenarioError
from plait_loadtest.mix.control_images import control_image, mask_image
from plait_loadtest.scenario import Edits

__all__ = ["EditFields", "read_images"]

_FIRST = 1 << 40
"""Added to a request's number, so that it does not start from the image of a ControlNet."""


class EditFields:
    """Draws which requests of a class are edits and builds what these carry. Reads files once; raises
    `ScenarioError`."""

    def __init__(self, spec: Edits) -> None:
        self._spec = spec
        self._images = read_images("edits.images", spec.images)
        self._masks = read_images("edits.masks", spec.masks)
        self.columns = 2 if spec.share > 0 else 0

    def pick(self, uniforms: Floats) -> list[bool | None]:
        """Return for each row of `uniforms` (rows, columns) whether it has a mask; None for one that is no edit."""
        if not self.columns:
            return [None] * len(uniforms)
        return [
            masked < self._spec.masked if chosen < self._spec.share else None for chosen, masked in uniforms.tolist()
        ]

    def fields(self, index: int, edge: tuple[int, int], *, masked: bool) -> dict[str, object]:
        """Return the fields of request `index`; `edge`: width and height of what is drawn."""
        place = index % max(len(self._images), 1)
        image = self._images[place] if self._images else _text(control_image(_FIRST + index, *edge))
        found: dict[str, object] = {"image": image}
        if masked:
            found["mask"] = self._masks[place] if self._masks else _text(mask_image(index, *edge))
        if self._spec.strength is not None:
            found["strength"] = self._spec.strength
        return found


def read_images(field: str, paths: Sequence[Path]) -> list[str]:
    """Return files as base64. Raises `ScenarioError` that names the field."""
    found = []
    for path in paths:
        try:
            found.append(_text(path.read_bytes()))
        except OSError as error:
            raise ScenarioError(f"{field}: {path} cannot be read: {error.strerror}") from error
    return found


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
