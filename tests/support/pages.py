"""Pages that open offline."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree


class _Tags(HTMLParser):
    """Fails on tags that are not closed in order; collects attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_stands_alone(html: str) -> int:
    """Well-formed, nothing fetched, no handler in an attribute, and each drawing is named and has no number that is
    none. Returns how many drawings there are."""
    tags = _Tags()
    tags.feed(html)
    assert tags.open == []
    assert not {"src", "href", "srcset", "onload", "onclick"} & tags.attributes
    assert "url(" not in html
    assert "@import" not in html
    drawings = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.get("aria-label") or tree.get("aria-hidden")
        assert not re.search(r"(?<![a-z])(nan|inf)(?![a-z])", drawing)
    return len(drawings)
