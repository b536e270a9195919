"""The report of a tuning job in a real browser: it opens from a file, runs nothing foreign, and its table sorts."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from plait_autoconfig.report.page import PageSource, report_page
from support.tune_jobs import job
from support.tuned import played

CHROMIUM = shutil.which("chromium")
SOURCE = PageSource(command="plait tune run demo.yaml", made_by="plait")
PROBE = """<script>
  const heads = [...document.querySelectorAll("th button")];
  const column = heads.findIndex(button => button.textContent === "goodput per cost");
  heads[column].click(); heads[column].click();
  const values = [...document.querySelectorAll("tbody tr")].filter(r => r.querySelector("td[data-sort]"))
    .map(r => r.children[column].dataset.sort).join(" ");
  document.body.dataset.sorted = values;
  document.body.dataset.wide = document.documentElement.scrollWidth <= window.innerWidth;
</script></body>"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


def opened(tmp_path, html, width):
    """The page's DOM after its scripts ran, and what the browser complained about."""
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(("limit", "width"), [("p99_ms <= 60", 1200), ("p99_ms <= 5", 500)])
def test_the_report_opens_and_sorts(tmp_path, limit, width):
    """Of a feasible job on a desk and of an infeasible one on a phone: no complaint of the browser, nothing wider than
    the window, and a second click on a column's head sorts it from the largest down."""
    html = report_page(played(job(limits=[limit], budget={"trials": 12})), SOURCE)
    _, complaints = opened(tmp_path, html, width)
    assert complaints == []
    lenient = re.sub(r"<meta http-equiv=.*?>", "", html).replace("</body>", PROBE)
    dom, complaints = opened(tmp_path, lenient, width)
    assert complaints == []
    values = [float(value) for value in re.search(r'data-sorted="([^"]*)"', dom)[1].split()]
    assert values == sorted(values, reverse=True)
    assert len(values) > 12
    assert 'data-wide="true"' in dom


def test_the_page_forbids_foreign_scripts(tmp_path):
    """Its policy blocks a script that is not its own, as the browser says."""
    html = report_page(played(most=3), SOURCE)
    _, complaints = opened(tmp_path, html.replace("</body>", "<script>alert(1)</script></body>"), 900)
    assert len(complaints) == 1
    assert "Content Security Policy" in complaints[0]
