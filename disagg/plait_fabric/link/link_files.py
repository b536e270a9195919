"""Files of link parameters: JSON, a value and its source for each. `LINKS` is the file that ships with plait.

::

    {"format": "plait.links", "version": 1, "links": {
        "mine": {"like": "100g-same-switch", "alpha_s": {"value": 2.1e-6, "source": "ib_write_lat, 2026-11-02"}}}}

A link that is `like` another of the same file inherits the parameters that it does not set itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait_fabric.link.link import PARAMETERS, BadLink, Link

LINKS = Path(__file__).with_name("links.json")

_FORMAT, _VERSION = "plait.links", 1
_LONGEST_FILE_BYTES = 1 << 20


class BadLinkFile(ValueError):
    """The file is not a file of links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedLink:
    """A link, and the source of each of its parameters, by name."""

    link: Link
    sources: Mapping[str, str]


def read_links(path: Path) -> dict[str, SourcedLink]:
    """Load all links of a file by name. Raises `BadLinkFile`, `BadLink`, OSError."""
    if path.stat().st_size > _LONGEST_FILE_BYTES:
        raise BadLinkFile(f"{path}: larger than {_LONGEST_FILE_BYTES} bytes")
    try:
        return parse_links(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadLinkFile(f"{path}: not a text file: {error}") from error


def parse_links(text: str) -> dict[str, SourcedLink]:
    """Parse all links of a file's text, as `read_links`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLinkFile(f"not JSON: {error}") from error
    if not isinstance(document, dict) or set(document) != {"format", "version", "links"}:
        raise BadLinkFile("must be an object of format, version and links, and nothing else")
    if (document["format"], document["version"]) != (_FORMAT, _VERSION):
        raise BadLinkFile(
            f"must be {_FORMAT}, version {_VERSION}; it says {document['format']!r}, {document['version']!r}"
        )
    entries = document["links"]
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise BadLinkFile("links must be an object of objects")
    return {name: _resolve(name, entries) for name in entries}


def links_document(links: Mapping[str, SourcedLink]) -> str:
    """Return the text of a file of those links, each with all of its parameters."""
    described = {
        name: {key: {"value": getattr(one.link, key), "source": one.sources[key]} for key in PARAMETERS}
        for name, one in links.items()
    }
    return json.dumps({"format": _FORMAT, "version": _VERSION, "links": described}, indent=1) + "\n"


def _resolve(name: str, entries: Mapping[str, dict[str, Any]]) -> SourcedLink:
    chain = _chain(name, entries)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for link in reversed(chain):
        for field, said in entries[link].items():
            if field != "like":
                values[field], sources[field] = _said(link, field, said)
    missing = [field for field in PARAMETERS if field not in values]
    if missing:
        raise BadLink(name, missing[0], "is missing")
    return SourcedLink(link=Link(name=name, **values), sources=sources)


def _chain(name: str, entries: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return the link, the one it is like, the one that is like, and so on."""
    chain = [name]
    while "like" in entries[chain[-1]]:
        other = entries[chain[-1]]["like"]
        if not isinstance(other, str) or other not in entries or other in chain:
            raise BadLink(chain[-1], "like", f"{other!r} is not another link of the file, or is like this one")
        chain.append(other)
    return chain


def _said(link: str, field: str, said: object) -> tuple[Any, str]:
    if field not in PARAMETERS:
        raise BadLink(link, field, f"is no parameter; there are {', '.join(PARAMETERS)}")
    if not isinstance(said, dict) or set(said) != {"value", "source"}:
        raise BadLink(link, field, "must be an object of value and source")
    value, source = said["value"], said["source"]
    if not isinstance(source, str) or not source.strip():
        raise BadLink(link, field, "must say its source")
    return value, source
