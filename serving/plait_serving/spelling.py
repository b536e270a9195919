"""What somebody may have meant by a name that does not exist: the nearest one that does."""

from __future__ import annotations

import difflib
import re
import typing
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

_MAX_CHARS = 64  # of names that are compared: the work grows with their square
_MAX_COMPARED = 64  # each takes some 20 microseconds, on the event loop
_QUOTED = re.compile(r"'([^']*)'")


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing if no known name is near. Of many names, those next to it in the order of
    the alphabet are compared."""
    folded, word = {other.lower(): other for other in known}, name[:_MAX_CHARS].lower()
    ordered = list(folded)
    if len(ordered) > _MAX_COMPARED:
        ordered.sort()
        ordered = ordered[max(0, bisect(ordered, word) - _MAX_COMPARED // 2) :][:_MAX_COMPARED]
    near = difflib.get_close_matches(word, ordered, n=1)
    return f"; did you mean {folded[near[0]]}?" if near else ""


def choice_hint(error: Mapping[str, Any]) -> str:
    """Return a hint for one of pydantic's errors about a value that is none of a few."""
    value = error.get("input")
    if error["type"] not in ("literal_error", "enum") or not isinstance(value, str):
        return ""
    return hint(value, _QUOTED.findall(str(error["ctx"]["expected"])))


def fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Return the fields of what contains the last part of a path, where pydantic found it in `model`."""
    here = [model]
    for part in path[:-1]:
        # What is no field is an index, a key of a mapping or the tag of a union.
        inner = [found for each in here if part in each.model_fields
                 for found in _models_in(each.model_fields[str(part)].annotation)]  # fmt: skip
        here = inner or here
    return [name for each in here for name in each.model_fields]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in typing.get_args(annotation) for found in _models_in(argument)]
