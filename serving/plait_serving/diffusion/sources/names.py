"""The names of what lies in folders, LoRAs and base models, by which requests find it. Names that a configuration gives
are narrower (`values.NAME_PATTERN`).

A name is only ever looked up among those that there are; it is never joined to a path.
"""

from __future__ import annotations

import logging
import threading
import unicodedata
from collections.abc import Mapping
from pathlib import Path

_MAX_CHARS = 200
RULE = (
    f"a name has 1 to {_MAX_CHARS} characters, none of them / \\ : < > or invisible, no space at its ends, and is not "
    ". or .."
)
HIDDEN = "hidden: what begins with a dot may be half-written"
NOWHERE, OUT = "a link that leads nowhere", "a link that leads out of the folder"

_MARKS = frozenset("/\\:<>")
_INVISIBLE = ("Cc", "Cf", "Cs")  # control, format (of no width, or of the direction of text), and half characters
_LONGEST_SPELLING = 4 * _MAX_CHARS  # no character of a composed text stands for more than four


def composed(text: str) -> str:
    """Return a text as names are kept and compared, in NFC: `é` is one character, however it was typed.

    What is too long for a name stays as it is: composing takes time with the square of the length.
    """
    return text if text.isascii() or len(text) > _LONGEST_SPELLING else unicodedata.normalize("NFC", text)


def is_name(text: str) -> bool:
    """Return whether a text can be a name, by `RULE`; one that is not composed cannot."""
    if not 1 <= len(text) <= _MAX_CHARS or text in (".", "..") or text != text.strip() or not _MARKS.isdisjoint(text):
        return False
    if not text.isprintable() and any(unicodedata.category(char) in _INVISIBLE for char in text):
        return False
    return unicodedata.is_normalized("NFC", text)


def why_not(file: str) -> str | None:
    """Return why something with that name in a folder is not served, if it is the name; `file` without its suffix."""
    if file.startswith("."):
        return HIDDEN
    return None if is_name(composed(file)) else RULE


def shown(path: Path | str) -> str:
    """Return a path for a line of the log, whatever bytes are in it."""
    return repr(str(path))[1:-1]


class LeftOut:
    """Logs what a folder holds that is not served: each path once, and again once it was gone. Thread-safe."""

    def __init__(self, log: logging.Logger, folder: Path) -> None:
        self._log = log
        self._folder = folder
        self._reported: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def tell(self, reasons: Mapping[str, str]) -> None:
        """Take all that is left out now: paths below the folder, each with its reason."""
        with self._lock:
            new = reasons.items() - self._reported
            self._reported = set(reasons.items())
        for path, why in sorted(new):
            self._log.warning("%s is ignored: %s", shown(self._folder / path), why)
