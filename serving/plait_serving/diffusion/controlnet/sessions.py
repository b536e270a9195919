"""What a ControlNet keeps of a request from step to step, wherever it runs; a service keeps it in a table, bounded in
bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import torch

from plait_serving.diffusion.errors import EngineError, RequestError
from plait_serving.diffusion.protocols import Conditioning, ControlCall
from plait_serving.diffusion.values import RgbImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """What does not change from step to step: `embedding (1, E, h, w)` of the control image, and the text. `request`:
    whose they are, for the log."""

    embedding: torch.Tensor
    conditioning: Conditioning
    request: str = ""

    @property
    def rows(self) -> int:
        """R: the number of images times branches."""
        return int(self.conditioning.text.shape[0]) * self.conditioning.n


def batch_key(call: ControlCall) -> Hashable:
    """Return a key; calls with equal keys can share one forward pass."""
    text, added = call.session.conditioning.text, call.session.conditioning.added
    shapes = tuple(sorted((name, tuple(value.shape[1:]), value.dtype) for name, value in added.items()))
    return tuple(call.sample.shape[1:]), call.sample.dtype, tuple(text.shape[1:]), text.dtype, shapes


def check_image(image: RgbImage) -> None:
    """Raise `RequestError` for an image that is not `uint8 (H, W, 3)`."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise RequestError(f"a control image must be uint8 (H, W, 3), not {image.dtype} {image.shape}", param="image")


Held = Constants | EngineError
"""A session's constants, or why they could not be computed."""

_MIN_BYTES = 1_024
"""The min size that a session counts as, so that errors are bounded too."""


class SessionTable:
    """Sessions by (peer, number), least recently used first. Not thread-safe.

    When they hold more than `capacity_bytes`, the least recently used are dropped, never the newest. Their clients get
    "unknown session" and open them again.
    """

    def __init__(self, *, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[tuple[int, int], Held] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, peer: int, session: int, held: Held) -> None:
        """Add a session, replacing an earlier one of that number."""
        self.forget(peer, session)
        self._entries[peer, session] = held
        self._nbytes += _nbytes_of(held)
        while self._nbytes > self._capacity_bytes and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def get(self, peer: int, session: int) -> Held | None:
        """Return the session, now the most recently used; None if it is not known, or no longer."""
        held = self._entries.get((peer, session))
        if held is not None:
            self._entries.move_to_end((peer, session))
        return held

    def forget(self, peer: int, session: int) -> None:
        """Drop one session, if it is known."""
        if (peer, session) in self._entries:
            self._drop((peer, session))

    def forget_peer(self, peer: int) -> None:
        """Drop everything that a peer opened."""
        for key in [key for key in self._entries if key[0] == peer]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        self._nbytes -= _nbytes_of(self._entries.pop(key))


def _nbytes_of(held: Held) -> int:
    if isinstance(held, EngineError):
        return _MIN_BYTES
    tensors = [held.embedding, held.conditioning.text, *held.conditioning.added.values()]
    return _MIN_BYTES + sum(tensor.nbytes for tensor in tensors)
