"""The building blocks of a report's page: head, tiles, sections, tables. Text is escaped here, markup is not.

Styles are inline, and the only script, on pages that ask for it, sorts tables. `POLICY` forbids the browser to fetch or
to run anything else.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Container, Iterable, Sequence
from html import escape
from importlib import resources

_STYLE, _SORT = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("style.css", "sort.js"))

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(_SORT.encode()).digest()).decode()}'; base-uri 'none'"
)
"""The Content-Security-Policy under which a page works; one whose tables can be sorted also contains it."""


def html_page(title: str, body: Iterable[str], *, sorts: bool = False) -> str:
    """Return a whole document. `body` is markup, `title` is text. `sorts`: a click on the head of a column
    (`table(sorts=True)`) sorts by it."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n' if sorts else ""
    script = f"<script>{_SORT}</script>" if sorts else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{policy}'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}{script}\n</main>\n</body>\n</html>\n"
    )


def header(over: Iterable[str], verdict: tuple[str, str], leads: Iterable[str], reasons: Iterable[str] = ()) -> str:
    """Return what a page says first: a small line, the verdict (its class and text), sentences, and a list."""
    kind, words = verdict
    said = "".join(f'<p class="lead">{escape(text)}</p>' for text in leads)
    listed = "".join(f"<li>{escape(text)}</li>" for text in reasons)
    return (
        f'<header><p class="over">{escape(" · ".join(over))}</p><h1 class="{kind}">{escape(words)}</h1>{said}'
        + (f'<ul class="reasons">{listed}</ul>' if listed else "")
        + "</header>"
    )


def tiles(values: Iterable[tuple[str, str, str, str]], *, bad: Container[str] = ()) -> str:
    """Return the numbers that matter most: (name, value, unit, a note below). `bad`: the names of bad ones."""
    cells = [
        f'<div><dt>{escape(name)}</dt><dd class="{"bad" if name in bad else ""}">{escape(value)}'
        f"<small>{escape(unit)}</small>{f'<span>{escape(below)}</span>' if below else ''}</dd></div>"
        for name, value, unit, below in values
    ]
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def section(title: str, note: str, *content: str) -> str:
    """Return a heading, a sentence below it (may be empty), and markup."""
    said = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{''.join(content)}</section>\n"


def details(summary: str, text: str) -> str:
    """Return text that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def footer(text: str) -> str:
    """Return the last line of a page; nothing for no text."""
    return f"<footer>{escape(text)}</footer>" if text else ""


def table(
    columns: Iterable[str], rows: Iterable[Sequence[str]], *, text: Container[str] = ("why",), sorts: bool = False
) -> str:
    """Return a table of column names and finished cells (`cell`, `row_head`). `text`: the columns that hold text."""
    said = [(name, f'<button type="button">{escape(name)}</button>' if sorts else escape(name)) for name in columns]
    head = "".join(f'<th scope="col"{_class("text" * (name in text))}>{shown}</th>' for name, shown in said)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(text: str, kind: str = "", *, sort: str | None = None) -> str:
    """Return one cell; `kind` is its CSS class: good, bad, text. `sort`: what it is sorted by, if not its text."""
    by = "" if sort is None else f' data-sort="{escape(sort)}"'
    return f"<td{_class(kind)}{by}>{escape(text)}</td>"


def row_head(text: str) -> str:
    """Return the first cell of a row."""
    return f'<th scope="row">{escape(text)}</th>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def number(value: float | None) -> str:
    """Return three significant digits without an exponent; a dash where nothing was measured."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    value = float(f"{value:.3g}")  # 0.09999 is 0.100: round before counting digits
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits else f"{round(value):,}"
