"""The LoRAs of an engine as cards, made once for as long as they stay the same."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.lora.key_formats import format_of_keys
from plait_serving.diffusion.lora.parse import MAX_FILE_BYTES
from plait_serving.diffusion.lora.source import FolderSource, LoraSource
from plait_serving.images.service import LoraCard

_PERIOD_S = 1.0  # half of what a new file may take to be known
_HEADERS_S = 0.1  # of every period: images are made on the same cores


class LoraCards:
    """The LoRAs that exist now. Who asks takes in, once in a while, what is new in a folder: each file's header is read
    once, and again when the file has changed; until then its format is "unknown", as that of a file in a store."""

    def __init__(
        self,
        source: LoraSource,
        family: Callable[[], str],
        *,
        formats: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`formats=False`: no file is opened, and nobody looks what is in the folder."""
        self._source = source
        self._folder = source if formats and isinstance(source, FolderSource) else None
        self._family = family
        self._clock = clock
        self._looking = threading.Lock()
        self._looked_s = -math.inf
        self._listing: object = None
        self._stamps: dict[str, str] = {}
        self._formats: Mapping[str, tuple[str, str]] = {}  # by name: the file's stamp, and its format
        self._made: tuple[object, tuple[LoraCard, ...]] = (None, ())

    def cards(self) -> tuple[LoraCard, ...]:
        """Return the cards, sorted by name: the same object while nothing has changed."""
        if self._folder is not None and self._looking.acquire(blocking=False):  # else another thread looks
            try:
                self._look(self._folder)
            finally:
                self._looking.release()
        of = (self._source.names(), self._formats, self._family())
        made_of, cards = self._made
        if of != made_of:
            names, formats, family = of
            cards = tuple(
                LoraCard(name=name, family=family, format=formats.get(name, ("", "unknown"))[1]) for name in names
            )
            self._made = (of, cards)
        return cards

    def _look(self, folder: FolderSource) -> None:
        """Take in what came, went or changed, and read headers for a while."""
        if self._clock() < self._looked_s + _PERIOD_S:
            return
        self._looked_s = self._clock()
        listing = folder.look()
        if listing is not self._listing:
            self._listing, self._stamps = listing, folder.stamps()
        stop_s = self._clock() + _HEADERS_S
        formats = {name: it for name, it in self._formats.items() if self._stamps.get(name) == it[0]}
        for name, stamp in self._stamps.items():
            if self._clock() > stop_s:
                break
            if name not in formats:
                formats[name] = (stamp, _format(folder, name))
        if formats != self._formats:
            self._formats = formats


def _format(folder: FolderSource, name: str) -> str:
    try:
        return format_of_keys(inspect(folder.fetch(name), max_bytes=MAX_FILE_BYTES).tensors)
    except (EngineError, OSError):
        return "unreadable"
