"""What the documents promise about themselves: links and names lead somewhere, blocks run or say why not."""

from __future__ import annotations

import re
import subprocess

import pytest

from support.documents import FENCE, FOLDERS, GUIDES, PAGES, ROOT, blocks_of, read

HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def anchors(text: str) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(FENCE.sub("", text)))
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain)


def links(text: str) -> list[str]:
    """Targets of the links and images outside of code."""
    return [found["target"] for found in LINK.finditer(FENCE.sub("", text))]


LINKED = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", *(f"{folder}/{name}" for folder in FOLDERS for name in ("*.md", "docs/*.md")))
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_guide_that_readme_leads_to(folder):
    """A pillar's guide is one link away from README.md, and its pages one from the guide."""
    assert f"{folder}/README.md" in links(read("README.md"))
    targets = {target.partition("#")[0] for target in links(read(f"{folder}/README.md"))}
    assert {page.removeprefix(f"{folder}/") for page in PAGES if page.startswith(f"{folder}/")} <= targets


def test_documents_can_be_read_in_one_go():
    """README.md has at most 7,000 bytes, ARCHITECTURE.md 20,000, a guide or a page 15,000, all but the log of changes
    170,000."""
    most = {**dict.fromkeys(GUIDES, 15_000), "README.md": 7_000, "ARCHITECTURE.md": 20_000}
    assert {name: size for name in most if (size := len(read(name).encode())) > most[name]} == {}
    cards = ROOT.glob("serving/plait_serving/starter/weights/**/*.md")
    documents = [*cards, *(ROOT / name for name in LINKED if name != "CHANGELOG.md")]
    assert sum(document.stat().st_size for document in documents) <= 170_000


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


def test_architecture_names_what_is_there():
    """Every file and folder that ARCHITECTURE.md names exists."""
    text = read("ARCHITECTURE.md")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        return  # an unpacked archive without git
    files = [f"/{name}" for name in listed.splitlines()]
    named = re.findall(r"`([\w./-]+\.(?:py|json))`", text)
    folders = re.findall(r"`((?:serving|disagg|autoconfig|kernels|deploy|loadtest|tests)/[\w/]+?)/?`", text)
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
    assert [name for name in folders if not any(file.startswith(f"/{name}/") for file in files)] == []


def test_blocks_that_do_not_run_say_why():
    """Every reason is a phrase."""
    reasons = [block.reason for document in GUIDES for block in blocks_of(document, read(document)) if block.reason]
    assert [reason for reason in reasons if len(reason.split()) < 3] == []


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
