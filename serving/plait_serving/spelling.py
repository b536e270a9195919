"""Words for mistakes: the nearest name that exists, and pydantic's sentences as a user would say them."""

from __future__ import annotations

import difflib
import re
import typing
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

_MAX_CHARS = 64  # of names that are compared: the work grows with their square
_MAX_COMPARED = 64  # each takes some 20 microseconds, on the event loop
_QUOTED = re.compile(r"'([^']*)'")
_PLAIN = (
    (r"^Value error, ", ""),
    (r"^Field required$", "must be given"),
    (r"^Input should be a valid (?:dictionary|mapping).*", "must be a mapping"),
    (r"^Input should be a valid (?:list|tuple|set).*", "must be a list"),
    (r"^Input should be a valid integer.*", "must be a whole number"),
    (r"^Input should be a valid number.*", "must be a number"),
    (r"^Input should be a valid boolean.*", "must be true or false"),
    (r"^Input should be a valid string$", "must be text"),
    (r"^Input is not a valid path.*", "must be a path"),
    (r"^[A-Z][a-z]+ should ", "must "),
    (r"be greater than or equal to", "be at least"),
    (r"be less than or equal to", "be at most"),
    (r" after validation", ""),
)
_KINDS = ("_type", "_parsing", "_from_float")
"""What pydantic's errors about values of another kind end in."""


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


def plain(message: str) -> str:
    """Return one of pydantic's sentences in a user's words; any other as it is."""
    for pattern, words in _PLAIN:
        message = re.sub(pattern, words, message)
    return message


def told_once(errors: Iterable[Mapping[str, Any]], data: Any) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield the place in `data` and the record of each of pydantic's errors, its `msg` in plain words.

    Where a value may be of several kinds, pydantic tells what is wrong with it as each of them, and puts the kinds'
    names into the place. Here they are one: what is wrong with the kind that it is, or which kinds it may be.
    """
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        found.setdefault(_place(error, data), []).append({**error, "msg": plain(error["msg"])})
    for place, here in found.items():
        exact = [error for error in here if not error["type"].endswith(_KINDS)]
        if exact:
            yield from ((place, error) for error in exact)
        elif not any(other[: len(place)] == place != other for other in found):
            kinds = " or ".join(dict.fromkeys(str(error["msg"]).removeprefix("must be ") for error in here))
            yield place, {**here[-1], "msg": f"must be {kinds}" if len(here) > 1 else here[0]["msg"]}


def _place(error: Mapping[str, Any], data: Any) -> tuple[str, ...]:
    *outer, last = error["loc"] or ("",)
    place: list[str] = []
    for part in outer:
        if (part in data) if isinstance(data, dict) else (isinstance(data, list) and isinstance(part, int)):
            data = data[part]
            place.append(str(part))
    is_key = error["type"] == "missing" or isinstance(last, int) or (isinstance(data, dict) and last in data)
    return (*place, str(last)) if is_key else tuple(place)


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
