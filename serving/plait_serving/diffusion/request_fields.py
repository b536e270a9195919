"""How a field of requests is declared: in one place, beside what the engine reads.

With `Annotated`, a `RequestField` gives a field of `values.ImageRequest` or `values.Edit` what every other form of it
is made of: the member of a JSON body, the part of a form, the schema, what the answer tells, the image's text, and a
control of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, cast, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_PROMPT_CHARS = 32_000  # OpenAI's limit

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def _printable(text: str) -> str:
    found = _CONTROL.search(text)
    if found is not None:
        raise PydanticCustomError(
            "control_character",
            "control character U+{code} at position {position}",
            {"code": f"{ord(found[0]):04X}", "position": found.start()},
        )
    return text


# -0.0 becomes 0.0, so that equal sets print and hash alike.
_positive_zero = AfterValidator(lambda value: value + 0.0)


def pixels_of(value: object) -> tuple[int, int]:
    """Return `(width, height)` of `"64x32"`, or of such a pair. Raises ValueError."""
    if isinstance(value, tuple):
        return cast("tuple[int, int]", value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise PydanticCustomError("size", 'a size is "WIDTHxHEIGHT" in pixels, for example "512x512"')
    return int(match[1]), int(match[2])


def _pair(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise PydanticCustomError("pair", "a list of two whole numbers")
    return tuple(value)


def text_of(chars: int) -> Any:
    """Return the type of a text of at most so many characters, none of them a control character."""
    return Annotated[str, Field(max_length=chars), AfterValidator(_printable)]


def between(low: float, high: float) -> Any:
    """Return the type of a number within bounds; no -0.0."""
    return Annotated[float, Field(ge=low, le=high, allow_inf_nan=False), _positive_zero]


def whole(low: int, high: int | None = None) -> Any:
    """Return the type of a whole number within bounds."""
    return Annotated[int, Field(ge=low, le=high)]


def choice(of: type[StrEnum]) -> Any:
    """Return the type of one of a few words, which becomes a member of `of`."""

    def word(value: object) -> object:
        return value.value if isinstance(value, of) else value

    words = tuple(each.value for each in of)
    return Annotated[Literal[words], BeforeValidator(word), AfterValidator(of)]


Text = text_of(MAX_PROMPT_CHARS)
Fraction = between(0.0, 1.0)
PixelSize = Annotated[tuple[int, int], PlainValidator(pixels_of), WithJsonSchema({"type": "string", "maxLength": 16})]
"""`(width, height)` from `"64x32"`."""
OutputSize = Annotated[
    tuple[int, int] | None,
    PlainValidator(lambda value: None if value == "auto" else pixels_of(value)),
    WithJsonSchema({"type": "string", "maxLength": 16, "description": '"WIDTHxHEIGHT" or "auto" (the model\'s own)'}),
]
_Place = Annotated[int, Field(ge=0, le=99_999)]
Corner = Annotated[tuple[_Place, _Place], BeforeValidator(_pair)]
"""`(left, top)` from a list."""


def written(value: Any) -> str:
    """Return a value as A1111 writes it: the shortest text that reads back as the same."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """What requests may say of a field, beside its type and default in `Annotated`.

    `type`: pydantic's, of what clients send; it makes the engine's value of that. `name`: clients' name for it, if that
    is another. `infotext`: its key in the text of an image, unless it has its default or is nothing; `write`: how it is
    written there. `only_some`: only some models have a use for it (`RequestTerms.takes`). `echoed`: answers tell it.
    `control`: its label on the page, which draws what the type says.
    """

    type: Any
    about: str | None = None
    name: str = ""
    infotext: str | None = None
    write: Callable[[Any], str] = written
    only_some: bool = False
    echoed: bool = False
    control: str | None = None
    default: Any = None

    @property
    def wire_type(self) -> Any:
        """The type with what the schema says of it."""
        return Annotated[self.type, Field(description=self.about)]

    def check(self, value: Any) -> None:
        """Raise pydantic's ValidationError for a value that no client could have given."""
        _adapter(self.type).validate_python(value, strict=True)


_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _request_fields(of: Any) -> Mapping[str, RequestField]:
    hints, found = get_type_hints(of, include_extras=True), dict[str, RequestField]()
    for each in fields(of):
        for said in getattr(hints[each.name], "__metadata__", ()):
            found[each.name] = replace(said, name=said.name or each.name, default=each.default)
    return found


request_fields: Callable[[Any], Mapping[str, RequestField]] = cache(_request_fields)
"""The fields of a dataclass that requests may have, by the engine's names."""


def body_fields(of: type) -> dict[str, Any]:
    """Return them as fields of a body, for pydantic's `create_model`: each may be left out, or null."""
    return {each.name: (each.wire_type | None, None) for each in request_fields(of).values()}


def member_fields(of: type) -> dict[str, Any]:
    """Return them as members of an object in a body, which have their defaults."""
    return {each.name: (each.wire_type, each.default) for each in request_fields(of).values()}


def echoed_fields(of: type) -> dict[str, Any]:
    """Return those that answers tell as fields of one."""
    found = [each for each in request_fields(of).values() if each.echoed]
    return {each.name: (each.wire_type | None if each.default is None else each.wire_type, ...) for each in found}


def given(body: Any, of: type) -> dict[str, Any]:
    """Return what a body gives of them, by the engine's names."""
    values = ((name, getattr(body, each.name)) for name, each in request_fields(of).items())
    return {name: value for name, value in values if value is not None}


def echoed(values: Any) -> dict[str, Any]:
    """Return what an answer tells of an `ImageRequest` or `Edit`."""
    return {each.name: getattr(values, name) for name, each in request_fields(type(values)).items() if each.echoed}


def taken(of: type, takes: Collection[str]) -> Iterator[tuple[str, RequestField]]:
    """Yield the fields that requests may have for a model that takes these of those that are `only_some` models'."""
    for name, each in request_fields(of).items():
        if not each.only_some or name in takes:
            yield name, each


def controls(of: type, takes: Collection[str]) -> tuple[Mapping[str, Any], ...]:
    """Return what the page needs to draw, send and restore the fields that have a `control`, for a model that `takes`
    these."""
    return tuple(
        {
            "name": each.name,
            "label": each.control,
            "infotext": each.infotext,
            "default": each.default,
            "schema": TypeAdapter(each.wire_type).json_schema(),
        }
        for _, each in taken(of, takes)
        if each.control is not None
    )
