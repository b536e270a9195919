"""The building blocks of HTML reports: the page, its sections, tables. Text is escaped here."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape


def html_page(title: str, body: str, *, style: str, head: str = "") -> str:
    """Return a whole document with inline styles. `body`, `style` and `head` are markup; `title` is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{head}'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, note: str, content: str) -> str:
    """Return a heading, a sentence below it (may be empty), and markup."""
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(note)}</p>' if note else ''}{content}</section>\n"


def table(columns: Iterable[str], rows: Iterable[Sequence[str]], *, text: Container[str] = ("why",)) -> str:
    """Return a table of column names and finished cells (`cell`, `row_head`). `text`: the columns that hold text."""
    head = "".join(f'<th scope="col"{_text_class(name in text)}>{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(text: str, kind: str = "") -> str:
    """Return one cell; `kind` is its CSS class: good, bad, text."""
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def row_head(text: str) -> str:
    """Return the first cell of a row."""
    return f'<th scope="row">{escape(text)}</th>'


def _text_class(is_text: bool) -> str:
    return ' class="text"' if is_text else ""
