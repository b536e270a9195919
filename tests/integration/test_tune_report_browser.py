"""The report of a tuning job in a real browser: it opens from a file, runs nothing foreign, and its table sorts."""

from __future__ import annotations

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


def test_the_report_opens_sorts_and_runs_nothing_foreign(window, tmp_path):
    """As a file on somebody's phone, of a feasible job and of an infeasible one: no complaint of the browser, nothing
    wider than the window, and a second click on a column's head sorts it from the largest down. Its policy blocks a
    script that is not its own, as the browser says."""
    page, file = window(width=500), tmp_path / "report.html"
    for limit in ("p99_ms <= 60", "p99_ms <= 5"):
        html = report_page(played(job(limits=[limit], budget={"trials": 12})), **SOURCE)
        file.write_text(html, encoding="utf-8")
        page.open(file.as_uri())
        values = page.run(SORT)
        assert values == sorted(values, reverse=True)
        assert len(values) > 12
        assert page.run("return document.documentElement.scrollWidth") <= 500
        assert page.complaints() == []
    file.write_text(html.replace("</body>", "<script>document.title = 'foreign'</script></body>"), encoding="utf-8")
    page.open(file.as_uri())
    (complaint,) = page.complaints()
    assert "Content Security Policy" in complaint
    assert page.run("return document.title") != "foreign"
