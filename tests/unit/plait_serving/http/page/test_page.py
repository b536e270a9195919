"""The page's files: what is sent, with which headers, and that nothing else is; `test_page_browser.py` uses them."""

from __future__ import annotations

import gzip
import re
from pathlib import PurePosixPath

import pytest

from fakes.images import FakeImageService
from plait_serving.http.page.routes import WEB_FOLDER, read_files
from support.http_app import make_client

OWN = sorted(path for path in WEB_FOLDER.rglob("*") if path.is_file() and path.parent.name != "swagger")


@pytest.fixture(scope="module")
def client():
    return make_client(FakeImageService())


def policy(answer):
    parts = (part.split() for part in answer.headers["content-security-policy"].split(";"))
    return {name: sources for name, *sources in parts}


@pytest.mark.parametrize("path", ["/", "/docs", "/ui/js/main.js"])
def test_nothing_foreign_may_run_or_be_loaded(client, path):
    """No inline script or style, no other origin, no frame around it, no guessing of types."""
    answer = client.get(path)
    assert answer.status_code == 200
    rules = policy(answer)
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == ["'self'"]
    assert rules["img-src"] == ["'self'", "blob:", "data:"]
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert ("require-trusted-types-for" in rules) == (path != "/docs")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("page", ["index.html", "docs.html"])
def test_pages_keep_to_their_policy(page):
    """No script or style within them, no handler in an attribute, no address of another host."""
    text = (WEB_FOLDER / page).read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son[a-z]+=|javascript:", text) == []
    assert re.findall(r'(?:src|href)="(?:[a-z]+:|//)', text) == []


def test_every_file_comes_with_its_type(client):
    """A browser runs a module only if it is called one."""
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    files = [name for name in read_files() if not name.endswith(".html")]
    assert len(files) > 25
    for name in files:
        answer = client.get(f"/ui/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].partition(";")[0] == kinds[PurePosixPath(name).suffix]
        assert answer.content == files_of(name)


def files_of(name):
    packed = WEB_FOLDER / f"{name}.gz"
    return gzip.decompress(packed.read_bytes()) if packed.exists() else (WEB_FOLDER / name).read_bytes()


def test_a_large_file_is_sent_as_it_is_packed(client):
    """To whoever understands gzip, which every browser does; others get it unpacked."""
    packed, plain = (
        client.get("/ui/swagger/swagger-ui-bundle.js", headers={"accept-encoding": accepted})
        for accepted in ("br, gzip", "br")
    )
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "accept-encoding")
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) * 3 < int(plain.headers["content-length"])


def test_the_ids_that_modules_look_up_are_in_the_page():
    """A renamed element fails here and not in a browser."""
    page = (WEB_FOLDER / "index.html").read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    asked = {
        found for path in OWN if path.suffix == ".js" for found in re.findall(r'byId\("([^"]+)"\)', path.read_text())
    }
    assert len(asked) > 25
    assert asked - ids == set()


def test_markup_is_never_made_of_text():
    """What a model or another person wrote stays text."""
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    assert {path.name for path in OWN if path.suffix == ".js" and re.search(sinks, path.read_text())} == set()


def test_a_file_is_sent_once_until_it_changes(client):
    """A browser asks each time and hears that it has the file."""
    first = client.get("/ui/js/main.js")
    assert first.headers["cache-control"] == "no-cache"
    for tag in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = client.get("/ui/js/main.js", headers={"if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert client.get("/ui/js/main.js", headers={"if-none-match": '"other"'}).content == first.content
    assert client.get("/ui/css/base.css").headers["etag"] != first.headers["etag"]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/", "/ui/js", "/ui/index.html", "/ui/swagger/LICENSE", "/ui/swagger/swagger-ui-bundle.js.gz",
        "/ui/../http/app.py", "/ui/%2e%2e/http/app.py", "/ui/..%2f..%2fapp.py", "/ui//etc/passwd",
        "/ui/js/../../http/app.py", "/ui/js%00.js", "/ui/js/main.js/", "/ui/JS/main.js", "/ui/..%5chttp%5capp.py",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder(client, path):
    """What is not a file of the page is not there."""
    answer = client.get(path)
    assert answer.status_code == 404, answer.text[:200]
    assert answer.json()["error"]["code"] == "unknown_route"
