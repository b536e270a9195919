"""The documents for people, their code blocks and their links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("serving", "disagg", "autoconfig", "kernels", "deploy", "loadtest", "tests")
PAGES = tuple(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("*/docs/*.md")))
"""What a guide leads to."""

GUIDES = ("README.md", *(f"{folder}/README.md" for folder in FOLDERS), *PAGES, "CONTRIBUTING.md")
"""Those whose code runs."""

FENCE = re.compile(r"^```(?P<language>[a-z]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_NO_RUN = re.compile(r"<!-- no-run: (?P<reason>.+?) -->\n\Z", re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block. ``file``: the name in its first line, where that is a comment with one (``# shop.py``).
    ``reason``: why it does not run, from the ``no-run`` comment directly above it."""

    document: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def file(self) -> str | None:
        """See `CodeBlock`."""
        found = re.match(r"# ([\w.-]+\.(?:py|yaml))\b", self.text)
        return found[1] if found else None

    @property
    def place(self) -> str:
        """Where people find it."""
        return f"{self.document}:{self.line}"


def blocks_of(document: str, text: str) -> Iterator[CodeBlock]:
    """The blocks of a document, from its beginning to its end."""
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        no_run = _NO_RUN.search(before)
        yield CodeBlock(
            document=document,
            line=before.count("\n") + 1,
            language=fence["language"],
            text=fence["text"],
            reason=no_run["reason"] if no_run else None,
        )


def read(document: str) -> str:
    """The text of a document."""
    return (ROOT / document).read_text(encoding="utf-8")
