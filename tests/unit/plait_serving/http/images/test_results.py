"""`response_format: url` over HTTP: generations and edits, who may fetch, and what a store that fails answers."""

from __future__ import annotations

import base64
import re
from dataclasses import replace

import pytest

from fakes.images import FakeImageService
from plait_serving.http.context import HttpSettings
from plait_serving.images.config import ResultsSection
from support.http_app import b64, make_client, png
from support.keys import api_key

URL, EDITS = "/v1/images/generations", "/v1/images/edits"


def settings(place, **more):
    kept = {"lifetime_s": 60.0, "max_bytes": 100_000, **more}
    return HttpSettings(results=ResultsSection(folder=place, **kept))


@pytest.mark.parametrize("path", [URL, EDITS])
@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_a_url_leads_to_the_bytes_that_base64_would_have_had(tmp_path, path, output_format):
    """Of each image, on this replica and on another one, without a key; in the form that was asked for."""
    keyed = replace(settings(tmp_path), api_keys=(api_key("sk", tenant="acme"),))
    one, other = make_client(FakeImageService(), keyed), make_client(FakeImageService(), keyed)
    body = {"prompt": "x", "n": 2, "output_format": output_format, **({"image": b64(png())} if path == EDITS else {})}
    headers = {"authorization": "Bearer sk"}
    plain = one.post(path, json={**body, "response_format": "b64_json"}, headers=headers).json()["data"]
    found = one.post(path, json={**body, "response_format": "url"}, headers=headers).json()["data"]
    assert [{"seed", "flagged", "url"}] * 2 == [set(each) for each in found]
    assert [{"seed", "flagged", "b64_json"}] * 2 == [set(each) for each in plain]
    for client in (one, other):
        for each, same in zip(found, plain, strict=True):
            assert re.fullmatch(r"http://testserver/v1/images/results/[0-9a-f]{9}-[\w-]{32}\.\w+", each["url"])
            answer = client.get(each["url"])
            assert answer.content == base64.b64decode(same["b64_json"])
            assert answer.headers["content-type"] == f"image/{output_format}"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "sandbox" in answer.headers["content-security-policy"]
            assert re.fullmatch(r"private, max-age=\d+, immutable", answer.headers["cache-control"])


def test_the_configuration_says_what_requests_get_that_do_not(tmp_path):
    """Of those that say it nothing changes; a stream has images in base64, as always."""
    client = make_client(FakeImageService(), settings(tmp_path, response_format="url"))
    for sent, member in (({}, "url"), ({"response_format": "b64_json"}, "b64_json")):
        for path, body in ((URL, {"prompt": "x"}), (EDITS, {"prompt": "x", "image": b64(png())})):
            assert member in client.post(path, json={**body, **sent}).json()["data"][0]
    streamed = client.post(URL, json={"prompt": "x", "stream": True})
    assert streamed.status_code == 200
    assert '"b64_json"' in streamed.text


def test_a_url_begins_with_the_configured_address(tmp_path):
    """And not with the host that the request says (`edge/test_hosts.py`)."""
    public = settings(tmp_path, public_url="https://images.example/api/")
    answer = make_client(FakeImageService(), public).post(URL, json={"prompt": "x", "response_format": "url"})
    assert answer.json()["data"][0]["url"].startswith("https://images.example/api/v1/images/results/")


def test_what_hides_behind_an_allowed_host_is_in_no_url(tmp_path):
    """What a browser would take for the host of such a URL."""
    client = make_client(FakeImageService(), replace(settings(tmp_path), allowed_hosts=("plait.example",)))
    headers = {"host": "plait.example:80@evil.example"}
    answer = client.post(URL, json={"prompt": "x", "response_format": "url"}, headers=headers)
    assert "evil" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_where_no_url_can_be_given_the_request_is_refused(tmp_path, stream):
    """Without a store, and in a stream, whose events have base64; before anything is made."""
    service = FakeImageService()
    client = make_client(service, settings(tmp_path) if stream else None)
    answer = client.post(URL, json={"prompt": "x", "response_format": "url", "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert ("stream" in answer.json()["error"]["message"]) == stream
    assert service.submitted == []


def test_a_full_store_refuses_before_it_costs_anything(tmp_path):
    """503 with the time to wait; base64 is still given."""
    service = FakeImageService()
    client = make_client(service, settings(tmp_path, max_bytes=1))
    first = client.post(URL, json={"prompt": "x", "response_format": "url"})
    assert (first.status_code, first.json()["error"]["code"]) == (503, "store_full")  # made, and too large
    (tmp_path / f"{2**33:09x}-{'a' * 32}.png").write_bytes(b"x")
    client = make_client(service, settings(tmp_path, max_bytes=1))
    before = len(service.submitted)
    answer = client.post(URL, json={"prompt": "x", "response_format": "url"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_full")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert len(service.submitted) == before
    assert client.post(URL, json={"prompt": "x"}).status_code == 200


def test_a_store_that_cannot_be_used_is_the_operators(tmp_path):
    """500 in one sentence without the path, and no client tries again."""
    (tmp_path / "file").write_bytes(b"")
    service = FakeImageService()
    client = make_client(service, settings(tmp_path / "file" / "kept"))
    answer = client.post(URL, json={"prompt": "x", "response_format": "url"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["x-should-retry"]) == (500, "store_failed", "false")
    assert str(tmp_path) not in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize("name", ["x", "..%2f..%2fetc%2fpasswd", f"{2**33:09x}-{'a' * 32}.png"])
@pytest.mark.parametrize("kept", [False, True])
def test_what_is_not_there_is_not_found(tmp_path, name, kept):
    """Whether or not the server keeps anything."""
    client = make_client(FakeImageService(), settings(tmp_path) if kept else None)
    answer = client.get(f"/v1/images/results/{name}")
    assert answer.status_code == 404
