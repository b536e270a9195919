"""The report of a tuning job in a real browser: it opens from a file, runs nothing foreign, and its table sorts."""

from __future__ import annotations

import pytest

from plait_autoconfig.report.page import report_page
from support.browser import needs_browser, window
from support.tune_jobs import job
from support.tuned import played

SOURCE = {"command": "plait tune run demo.yaml", "made_by": "plait"}
SORT = """
  const heads = [...document.querySelectorAll("th button")];
  const column = heads.findIndex(button => button.textContent === "goodput per cost");
  heads[column].click(); heads[column].click();
  return [...document.querySelectorAll("tbody tr")].filter(row => row.querySelector("td[data-sort]"))
    .map(row => Number(row.children[column].dataset.sort));"""

__all__ = ["window"]

pytestmark = needs_browser


def opened(window, tmp_path, html, width=900):
    """The report as a file on somebody's disk."""
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    page = window(width=width)
    page.open(file.as_uri())
    return page


@pytest.mark.parametrize(("limit", "width"), [("p99_ms <= 60", 1200), ("p99_ms <= 5", 500)])
def test_the_report_opens_and_sorts(window, tmp_path, limit, width):
    """Of a feasible job on a desk and of an infeasible one on a phone: no complaint of the browser, nothing wider than
    the window, and a second click on a column's head sorts it from the largest down."""
    page = opened(window, tmp_path, report_page(played(job(limits=[limit], budget={"trials": 12})), **SOURCE), width)
    values = page.run(SORT)
    assert values == sorted(values, reverse=True)
    assert len(values) > 12
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert page.complaints() == []


def test_the_page_forbids_foreign_scripts(window, tmp_path):
    """Its policy blocks a script that is not its own, as the browser says."""
    html = report_page(played(most=3), **SOURCE)
    page = opened(window, tmp_path, html.replace("</body>", "<script>document.title = 'foreign'</script></body>"))
    (complaint,) = page.complaints()
    assert "Content Security Policy" in complaint
    assert page.run("return document.title") != "foreign"
