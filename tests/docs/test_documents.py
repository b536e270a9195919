"""What the documents promise about themselves: README is short, links lead somewhere, numbers are the recorded ones."""

from __future__ import annotations

import re
import subprocess

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait_serving.http.images.schemas import GenerationBody
from support.app_server import AppServer
from support.documents import FOLDERS, GUIDES, ROOT, anchors, blocks_of, links, read
from support.readme_commands import USUAL_URL, DocumentShell

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


def test_guide_and_page_say_what_clip_skip_skips():
    """The prompt only, as in diffusers; with A1111's syntax the negative prompt too."""
    (row,) = [line for line in read("serving/README.md").splitlines() if line.startswith("| `clip_skip` |")]
    schema = GenerationBody.model_json_schema()["properties"]["clip_skip"]
    for text in (row, str(schema)):
        assert "negative prompt" in text
        assert re.search("diffusers.*prompt_syntax: a1111.*A1111", text)


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
    """Every file and folder that ARCHITECTURE.md names exists, and its lines fit a page."""
    text = read("ARCHITECTURE.md")
    assert [line for line in text.splitlines() if len(line) > 120] == []
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not listed:
        return  # an unpacked archive without git
    files = [f"/{name}" for name in listed.splitlines()]
    named = re.findall(r"`([\w./-]+\.(?:py|json))`", text)
    folders = re.findall(r"`((?:serving|disagg|autoconfig|kernels|deploy|loadtest)/[\w/]+?)/?`", text)
    assert len(named) > 40
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
    assert [name for name in folders if not any(file.startswith(f"/{name}/") for file in files)] == []


NOT_RUN = {
    "serving/README.md": 3,
    "disagg/README.md": 1,
    "autoconfig/README.md": 1,
    "deploy/README.md": 5,
    "loadtest/README.md": 4,
    "CONTRIBUTING.md": 1,
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


def test_a_shell_answers_for_plait_and_curl(tmp_path):
    """A command's output, exit code and redirections are the shell's; the stand-in for curl sends what curl would."""
    shell = DocumentShell(tmp_path)

    async def echo(request: Request) -> Response:
        return Response(await request.body() + request.headers["x-a"].encode(), status_code=200)

    app = AppServer(Starlette(routes=[Route("/echo", echo, methods=["POST"])]))
    try:
        shell.url = f"http://127.0.0.1:{app.port}"
        assert "plait" in shell.run("plait --version > v.txt && cat v.txt")
        with pytest.raises(AssertionError, match="exit code 2"):
            shell.run("plait nonsense")
        for curl in ("curl -s", "curl-twin -s"):
            assert shell.run(f"printf b > f; {curl} {USUAL_URL}/echo -H 'x-a: a' -d @f") == "ba"
            with pytest.raises(AssertionError, match="exit code"):
                shell.run(f"{curl.replace('-s', '-sfS')} {USUAL_URL}/nothing")
    finally:
        app.stop()
        shell.close()
