"""Requests that replicas die with: each is tried once more, alone, and not again if it was the cause."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import fields

import numpy as np

from plait_serving.diffusion.values import ControlRef, Edit, ImageRequest

__all__ = ["FatalRequests"]

_CAPACITY = 1_024
_REFUSED_FOR_S = 600.0
"""Long enough to spare the replicas a client that repeats itself; not for ever, because a replica that died twice for
another reason leaves innocent requests here."""
_OF_ONE_ATTEMPT = frozenset({"request_id", "seed", "deadline_s", "partial_images", "tenant", "tried_again_s"})
"""Fields that say nothing of what a replica computes, or that a client leaves to us."""


class FatalRequests:
    """What is known of the requests that were running when a replica died. For one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[bytes, float] = {}
        self.alone = asyncio.Semaphore(1)
        """Held by a request that is tried again until its first step is done: two that died together do not die
        together again."""
        self.died_alone = 0
        """How many died while they held it: what died with them was not the cause."""

    def killed_two(self, request: ImageRequest) -> None:
        """Record that a second replica died with the request."""
        key = _fingerprint(request)
        self._refused.pop(key, None)
        self._refused[key] = self._clock() + _REFUSED_FOR_S
        if len(self._refused) > _CAPACITY:
            del self._refused[next(iter(self._refused))]

    def is_refused(self, request: ImageRequest) -> bool:
        """Return whether two replicas died with such a request not long ago."""
        if not self._refused:  # as nearly always
            return False
        key = _fingerprint(request)
        until_s = self._refused.get(key)
        if until_s is not None and until_s <= self._clock():
            del self._refused[key]
            return False
        return until_s is not None


def _fingerprint(request: ImageRequest) -> bytes:
    """Return what requests have in common that make a replica compute the same, whatever their seeds."""
    digest = hashlib.sha256()
    for field in fields(request):
        if field.name not in _OF_ONE_ATTEMPT | {"controlnets", "edit"}:
            digest.update(repr((field.name, getattr(request, field.name))).encode("utf-8", "surrogatepass"))
    for control in request.controlnets:
        _add_control(digest, control)
    if request.edit is not None:
        _add_edit(digest, request.edit)
    return digest.digest()


def _add_control(digest: hashlib._Hash, control: ControlRef) -> None:
    settings = (control.name, control.scale, control.start, control.end, control.image.shape)
    digest.update(repr(settings).encode())
    digest.update(np.ascontiguousarray(control.image).data)


def _add_edit(digest: hashlib._Hash, edit: Edit) -> None:
    digest.update(repr((edit.strength, edit.image.shape, edit.mask is None)).encode())
    for array in (edit.image,) if edit.mask is None else (edit.image, edit.mask):
        digest.update(np.ascontiguousarray(array).data)
