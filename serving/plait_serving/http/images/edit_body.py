"""The body of an edit: JSON, or a form (multipart/form-data) as OpenAI's clients send it.

A form knows text and files only, so the values of fields that are neither are read as JSON. Nested fields come as JSON
in one field (`loras=[{"name": "noto"}]`), or spelled out as the `openai` client does (`loras[][name]=noto`), or with
numbers (`loras[0][name]=noto`). A browser's form sends all its fields: an empty one is left out, but for the prompt.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from plait_serving.http.edge.errors import ApiError, BodyRefused
from plait_serving.http.edge.json_body import parse_json
from plait_serving.http.edge.limits import MAX_JSON_VALUES
from plait_serving.http.images.schemas import MAX_LIST, EditBody

_FORM = "multipart/form-data"
_CHARSETS = frozenset({b"utf-8", b"utf8", b"us-ascii"})
"""Of a form. Python knows more than a hundred, and some of them (punycode) take time with the square of the text."""
_LONGEST_TYPE = 1024
"""Characters of a form's content-type, which takes as long to read."""
_MAX_PARTS = 6 * MAX_LIST
_SCHEMA = EditBody.model_json_schema(ref_template="#/components/schemas/{model}")
_NESTED = {"loras": _SCHEMA["$defs"]["LoraBody"], "controlnets": _SCHEMA.pop("$defs")["ControlNetBody"]}
_JSON_FIELDS = frozenset(
    name
    for schema in (_SCHEMA, *_NESTED.values())
    for name, each in schema["properties"].items()
    if not {"string", None} & {it.get("type") for it in each.get("anyOf", [each])}
)
"""Those that are neither text nor files. In a text field 1 is text."""

_PATH = re.compile(r"(?P<field>[a-z_]+)\[(?P<index>[0-9]{0,3})\]\[(?P<member>[a-z_]+)\]")


async def read_edit(request: Request) -> EditBody:
    """Return the body. Raises `ApiError`, `BodyRefused` or `RequestValidationError`."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _FORM:
        if len(content_type) > _LONGEST_TYPE or _charset(content_type) not in _CHARSETS:
            raise ApiError(400, "the form's content-type must be short, its charset UTF-8", code="invalid_form")
        fields = await _form(request)
    elif kind == "application/json":
        fields = await request.json()
    else:
        raise ApiError(400, f"the body must be JSON or {_FORM}, and its content-type say so", code="invalid_body")
    try:
        return EditBody.model_validate(fields)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise RequestValidationError(found) from error


def _charset(content_type: str) -> bytes:
    return parse_options_header(content_type)[1].get(b"charset", b"utf-8").lower()


async def _form(request: Request) -> dict[str, Any]:
    try:
        # Bodies are bounded as a whole (`limits.py`), and so are their parts.
        async with request.form(max_files=_MAX_PARTS, max_fields=_MAX_PARTS, max_part_size=2**40) as form:
            parts = [
                (name, await value.read() if isinstance(value, UploadFile) else value)
                for name, value in form.multi_items()
            ]
    except BodyRefused:
        raise
    except HTTPException as error:
        raise ApiError(400, f"the form could not be read: {error.detail}", code="invalid_form") from error
    if not parts:
        raise ApiError(400, "the form has no fields", code="invalid_form")
    return _fields(parts)


def _fields(parts: Iterable[tuple[str, str | bytes]]) -> dict[str, Any]:
    """Return a form's parts as the members of a JSON body."""
    fields: dict[str, Any] = {}
    nested: dict[str, dict[str, list[Any]]] = {}
    count = 0
    for name, value in parts:
        if not value and name != "prompt":
            continue
        if isinstance(value, str) and name.rstrip("]").rpartition("[")[2] in _JSON_FIELDS:
            count += sum(map(value.count, (",", "[", "{")))
        if count > MAX_JSON_VALUES:
            raise ApiError(413, f"the form has more than {MAX_JSON_VALUES:,} values", code="body_too_large", param=name)
        path = _PATH.fullmatch(name)
        if path is not None and path["field"] in _NESTED and path["member"] in _NESTED[path["field"]]["properties"]:
            members = nested.setdefault(path["field"], {})
            members.setdefault(f"{path['index']}.{path['member']}", []).append(_value(path["member"], value))
            continue
        field = "image" if name == "image[]" else name
        if field in fields:
            what = "one image is edited at a time" if field == "image" else "the form has it twice"
            raise ApiError(400, f"{field}: {what}", code="duplicate_field", param=field)
        if isinstance(value, bytes) and field not in ("image", "mask"):
            raise ApiError(400, f"{field[:200]}: a file, which only image and mask can be", code="invalid_value",
                           param=field)  # fmt: skip
        fields[field] = _value(field, value)
    for field, members in nested.items():
        if field in fields:
            raise ApiError(400, f"{field}: the form has it twice", code="duplicate_field", param=field)
        fields[field] = _objects(field, members)
    return fields


def _value(field: str, value: str | bytes) -> Any:
    """Return a part's value; text that is no JSON stays text, for the body's checks to refuse."""
    if isinstance(value, bytes):
        return value if field in ("image", "mask") else base64.b64encode(value).decode("ascii")
    if field == "preprocess" and value in ("true", "false"):
        return value == "true"
    if field not in _JSON_FIELDS:
        return value
    try:
        return parse_json(value.encode())
    except (ValueError, RecursionError):
        return value


def _objects(field: str, members: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the objects of a list that was spelled out. With `field[]` it is only known which members of one name came
    first, so every object must have all of them."""
    objects: dict[tuple[int, int], dict[str, Any]] = {}
    lengths = {len(values) for path, values in members.items() if path.startswith(".")}
    if len(lengths) > 1:
        raise ApiError(
            400, f"{field}: give every entry the same members, or all as JSON", code="invalid_value", param=field
        )
    for path, values in members.items():
        index, member = path.split(".")
        for i, value in enumerate(values):
            entry = objects.setdefault((int(index or -1), i), {})
            entry[member] = base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
    return [objects[key] for key in sorted(objects)]


_FILE = {"type": "string", "format": "binary"}
_TEXT = {"type": "string", "description": "JSON, as in a JSON body"}
_OF_FORMS = {**_SCHEMA["properties"], "image": _FILE, "mask": _FILE, "loras": _TEXT, "controlnets": _TEXT}

EDIT_REQUEST = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _SCHEMA},
            _FORM: {"schema": {**_SCHEMA, "title": "EditForm", "properties": _OF_FORMS}},
        },
    }
}
"""The request of an edit for the OpenAPI document."""
