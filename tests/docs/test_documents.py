"""What the documents promise about themselves: README is short, links lead somewhere, numbers are the recorded ones."""

from __future__ import annotations

import pytest

from plait_bench import headlines, records
from support.documents import FOLDERS, GUIDES, ROOT, anchors, blocks_of, links, read

README_BYTES = 12 << 10
LINKED = (*GUIDES, "ARCHITECTURE.md", "CHANGELOG.md")


def test_readme_can_be_read_in_one_go():
    """README.md has at most 12 KiB, and something to run within its first 40 lines."""
    text = read("README.md")
    assert len(text.encode()) <= README_BYTES
    assert "```bash\nmake serve\n```" in "\n".join(text.splitlines()[:40])


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_guide_that_readme_leads_to(folder):
    """A pillar's guide is one link away from README.md."""
    assert f"{folder}/README.md" in links(read("README.md"))


@pytest.mark.parametrize("document", LINKED)
def test_links_lead_somewhere(document):
    """Every relative link is a file of the repository, and its anchor one of that file's headings."""
    broken = []
    for target in links(read(document)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def test_headlines_are_the_recorded_results():
    """README.md opens with what ``loadtest/results`` holds today (which commits are known depends on the clone)."""

    def without_history(text):
        return text.replace(headlines.UNKNOWN_COMMIT, "")

    made = headlines.with_headlines(
        read("README.md"), lambda bench: records.read(headlines.RESULTS / f"{bench}.jsonl"), is_known=lambda _: True
    )
    assert made == without_history(read("README.md"))


def test_a_headline_that_is_not_ahead_says_so():
    """A ratio whose spread holds 1, or that lies on its wrong side, is marked; a missing one is no number."""
    empty = "<!-- headlines -->\n<!-- /headlines -->"
    first = headlines.HEADLINES[0]
    host = {"cpu": "c", "cores": 2, "ram_gib": 1.0, "date": "2026-01-01T00:00:00+00:00", "loadavg_1m": 0.25}
    row = {
        "bench": first.bench, "commit": "abc", "host": host, "workload": first.workload, "metric": first.metric,
        "system": first.systems, "unit": "ratio", "value": 1.5, "p20": 1.2, "p80": 1.6,
    }  # fmt: skip

    def made(**changes):
        rows = [{**row, **changes}]
        return headlines.with_headlines(
            empty, lambda bench: rows if bench == first.bench else [], is_known=lambda _: False
        ).splitlines()[3]

    assert headlines.NOT_AHEAD not in made()
    assert headlines.UNKNOWN_COMMIT in made()
    assert headlines.NOT_AHEAD in made(p20=0.9)
    assert "not measured" in made(workload="another")


NOT_RUN = {
    "serving/README.md": 1,
    "disagg/README.md": 1,
    "autoconfig/README.md": 1,
    "deploy/README.md": 2,
    "loadtest/README.md": 3,
}
"""How many blocks of a document do not run. One more is a decision, not an accident."""


def test_blocks_that_do_not_run_say_why():
    """Every reason is a phrase, and the number of such blocks is known; blocks of other languages are not code."""
    reasons = {
        document: [block.reason for block in blocks_of(document, read(document)) if block.reason is not None]
        for document in GUIDES
    }
    assert {document: len(found) for document, found in reasons.items() if found} == NOT_RUN
    assert all(len(reason.split()) >= 3 for found in reasons.values() for reason in found)
    for document, found in reasons.items():
        for reason in found:
            print(f"{document}: {reason}")


def test_blocks_and_links_are_found():
    """The parser itself: languages, reasons directly above only, file names, anchors, links outside of code."""
    text = (
        "# A `b` & c\n\n<!-- no-run: needs a cluster -->\n```bash\nx\n```\n<!-- no-run: no -->\n\n"
        "```python\n# shop.py\n[a](b)\n```\n\n[x](y.md#z) ![i](p.png)\n"
    )
    first, second = blocks_of("D.md", text)
    assert (first.place, first.language, first.text, first.reason) == ("D.md:4", "bash", "x\n", "needs a cluster")
    assert (second.file, second.reason) == ("shop.py", None)
    assert anchors(text) == {"a-b--c"}
    assert links(text) == ["y.md#z", "p.png"]
