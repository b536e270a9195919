"""Pages of other origins, those of another port of this machine too, change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from plait.config import ServerSection
from plait.deployments import http_settings
from plait_serving.deployments.proxy import OwnRoutesMiddleware
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge.hosts import LOOPBACK_HOSTS
from plait_serving.images.config import ResultsSection
from plait_serving.sections import Role
from support.http_app import make_app
from support.keys import api_key

KEYS = (api_key("sk-admin", tenant="ops", role=Role.ADMIN),)
SLEEP = "/v1/models/emoji/sleep"
LOCAL = "127.0.0.1:8000"


def asked(settings: HttpSettings, *, host=LOCAL, scheme="http", method="POST", path=SLEEP, **headers):
    """The status and code of a request that puts the model to sleep, and whether it did."""
    service = FakeImageService()
    client = TestClient(make_app(service, settings), base_url=f"{scheme}://{host}", raise_server_exceptions=False)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = client.request(method, path, headers=sent)
    code = answer.json()["error"]["code"] if answer.is_error and answer.content else None
    assert ("emoji" in service.asleep) == (answer.is_success and path == SLEEP and method == "POST")
    return answer.status_code, code


OPEN = HttpSettings()
"""A server without keys that listens on all interfaces: any host name is taken."""
LOOPBACK = HttpSettings(allowed_hosts=LOOPBACK_HOSTS)
NAMED = HttpSettings(allowed_hosts=(*LOOPBACK_HOSTS, "plait.example"))
REFUSED = (403, "origin_not_allowed")


@pytest.mark.parametrize("settings", [OPEN, NAMED], ids=["open", "named"])
@pytest.mark.parametrize(
    ("host", "scheme", "origin", "is_own"),
    [
        (LOCAL, "http", "HTTP://127.0.0.1:8000", True),
        (LOCAL, "http", "http://127.0.0.1", False),
        (LOCAL, "http", "", False),
        (LOCAL, "http", "chrome-extension://127.0.0.1:8000", False),
        ("127.0.0.1:80", "http", "http://127.0.0.1", True),
        ("127.0.0.1", "http", "http://127.0.0.1:80", True),
        ("127.0.0.1", "http", "http://127.0.0.1:3000", False),
        ("[::1]:8000", "http", "http://[::1]:8000", True),
        ("[::1]:8000", "http", "http://[::1]:3000", False),
        ("localhost:443", "https", "https://localhost", True),
        ("localhost:8000", "https", "http://localhost:8000", False),
        ("localhost:9999", "http", "http://localhost:9999", True),
        ("plait.example", "http", "https://plait.example", True),
        ("plait.example:443", "http", "https://plait.example", True),
        ("plait.example", "http", "https://plait.example:8443", False),
        ("plait.example", "http", "ftp://plait.example", False),
    ],
)
def test_a_page_is_the_servers_own_by_what_the_request_calls_it(settings, host, scheme, origin, is_own):
    """Host, port and scheme are those of the request's own Host header, wherever the server listens: an ssh tunnel
    (9999 here) and a forwarded port are the same as none. A proxy that ends TLS passes the host on: its pages are of
    https, its requests here of http; a port that is not said is that of the page's scheme. What no page of ours
    is called: `security/test_names.py`."""
    expected = (200, None) if is_own else REFUSED
    assert asked(settings, host=host, scheme=scheme, origin=origin) == expected


@pytest.mark.parametrize(
    ("settings", "host", "is_own"),
    [
        (LOOPBACK, "127.0.0.1", True),
        (LOOPBACK, "[::1]:8000", True),
        (LOOPBACK, "127.0.0.1.evil.example", False),
        (HttpSettings(allowed_hosts=("FE80::1",)), "[fe80::1]:8000", True),
    ],
)
def test_a_server_answers_to_its_own_names_only(settings, host, is_own):
    """A foreign name in the Host header is a page that points its own domain at this machine. An IPv6 address is
    configured without its brackets."""
    assert asked(settings, host=host) == ((200, None) if is_own else (403, "host_not_allowed"))


@pytest.mark.parametrize("settings", [OPEN, LOOPBACK], ids=["open", "loopback"])
@pytest.mark.parametrize(
    ("site", "is_own"),
    [("cross-site", False), ("same-site", False), ("Same-Site", False), ("same-origin", True), ("none", True)],
)
def test_without_an_origin_the_browser_says_whose_page_it_is(settings, site, is_own):
    """Another port of one host is `same-site`. An Origin says more, and is what counts where there is one."""
    assert asked(settings, sec_fetch_site=site) == ((200, None) if is_own else REFUSED)
    assert asked(settings, sec_fetch_site=site, origin=f"http://{LOCAL}") == (200, None)
    assert asked(settings, sec_fetch_site=site, origin="http://127.0.0.1:3000") == REFUSED


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/v1/images/results/x.png"])
def test_what_changes_nothing_is_not_looked_at(method, path):
    """A link on another page, and an image in it, are answered as before."""
    before = asked(LOOPBACK, method=method, path=path)
    for sent in ({"origin": "http://127.0.0.1:3000"}, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}):
        assert asked(LOOPBACK, method=method, path=path, **sent) == before


@pytest.mark.parametrize("origin", ["http://127.0.0.1:3000", "null"])
def test_a_valid_key_is_from_no_page_that_did_not_ask(origin):
    """Authorization needs a preflight, which only pages of allowed origins are answered. What is no key is worth
    nothing, nor is one where there are none."""
    named = HttpSettings(allowed_hosts=LOOPBACK_HOSTS, api_keys=KEYS)
    assert asked(named, origin=origin, authorization="Bearer sk-admin") == (200, None)
    assert asked(named, sec_fetch_site="same-site", authorization="Bearer sk-admin") == (200, None)
    for header in ("Bearer sk-other", "Basic sk-admin", "Bearer"):
        assert asked(named, origin=origin, authorization=header) == REFUSED
    assert asked(named, origin=origin) == REFUSED
    assert asked(LOOPBACK, origin=origin, authorization="Bearer sk-admin") == REFUSED
    wrong = asked(HttpSettings(api_keys=KEYS), origin=origin, authorization="Bearer sk-other")
    assert wrong == (401, "invalid_api_key")


def test_other_origins_are_accepted_by_configuration():
    """`server.allowed_origins` reaches the check, with default ports as browsers leave them out, and nothing else is
    accepted for it."""
    section = ServerSection(allowed_origins=("https://Studio.example:443", "http://localhost:3000", "app://desk"))
    settings = http_settings(section)
    for origin in ("https://studio.example", "http://localhost:3000", "app://desk"):
        assert asked(settings, origin=origin) == (200, None)
    for origin in ("http://studio.example", "https://studio.example:444", "http://localhost:3001", "app://other"):
        assert asked(settings, origin=origin) == REFUSED


@pytest.mark.parametrize(
    ("field", "text"),
    [
        *(("allowed_origins", each) for each in ("*", "null", "", "studio.example", "https://studio.example/")),
        *(("allowed_origins", f"https://{each}") for each in ("", "a@b.example", "*.example", "b:port", "bü.example")),
        *(("trusted_proxies", each) for each in ("localhost", "10.0.0.1/8", "", "*")),
    ],
)
def test_what_is_never_met_is_refused(field, text):
    """When the server starts: origins that no browser sends, and proxies that are no network."""
    with pytest.raises(ValidationError, match=field):
        ServerSection(**{field: (text,)})


STUDIO = "https://studio.example"


def preflight(client, origin, method="POST", headers="authorization,content-type,x-stainless-lang"):
    """What a browser asks before it sends a page's request."""
    asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
    return client.options("/v1/images/generations", headers=asked)


@pytest.mark.parametrize("keys", [(), KEYS], ids=["open", "keys"])
def test_pages_of_allowed_origins_may_ask_and_read(keys):
    """Each by its own name, never `*`, and without cookies; errors too, whoever refuses."""
    settings = http_settings(ServerSection(allowed_origins=("https://Studio.example:443",)))
    client = TestClient(make_app(FakeImageService(), replace(settings, api_keys=keys)), base_url=f"http://{LOCAL}")
    assert preflight(client, STUDIO, "DELETE").is_client_error
    for method in ("GET", "HEAD", "POST"):
        answer = preflight(client, STUDIO, method)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == STUDIO
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    for path, status in (("/health", 200), ("/v1/models", 401 if keys else 200), ("/v1/nothing", 401 if keys else 404)):
        answer = client.get(path, headers={"origin": STUDIO})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, STUDIO)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize("origin", ["https://studio.example.evil", "http://studio.example", "null", f"{STUDIO}:444"])
def test_other_pages_are_told_nothing(origin):
    """Nor is anybody where no origin is allowed."""
    allowed = make_app(FakeImageService(), HttpSettings(allowed_origins=(STUDIO,)))
    for app in (allowed, make_app(FakeImageService(), HttpSettings())):
        client = TestClient(app, base_url=f"http://{LOCAL}")
        refused = preflight(client, origin)
        assert refused.is_client_error
        assert refused.headers["content-type"] == "application/json"  # what is in plain text is Serve's
        for answer in (refused, client.get("/health", headers={"origin": origin})):
            assert "access-control-allow-origin" not in answer.headers


PROXY, KEPT = "10.1.2.3", "/v1/images/results/"


def url_of(tmp_path, client_address, **headers):
    """Where an image is kept, as it is told to who asks from that address; or the status."""
    section = ServerSection(host="0.0.0.0", trusted_proxies=("10.0.0.0/8", "fd00::/8"), allowed_hosts=("pub.example",))
    settings = http_settings(section, results=ResultsSection(folder=tmp_path))
    app = make_app(FakeImageService(), settings)
    client = TestClient(app, base_url="http://127.0.0.1:8000", client=(client_address, 1234))
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = client.post("/v1/images/generations", json={"prompt": "x", "response_format": "url"}, headers=sent)
    return answer.json()["data"][0]["url"].partition(KEPT)[0] if answer.is_success else answer.status_code


def test_a_trusted_proxy_says_how_it_was_asked(tmp_path):
    """Scheme and host, the last of several, and what is none is not believed; results' URLs begin so, and the public
    name has to be an allowed one."""
    said = {"x_forwarded_proto": "https", "x_forwarded_host": "pub.example"}
    assert url_of(tmp_path, PROXY, **said) == "https://pub.example"
    assert url_of(tmp_path, "fd00::7", **said) == "https://pub.example"
    assert url_of(tmp_path, "::ffff:10.0.0.1", **said) == "https://pub.example"
    assert url_of(tmp_path, PROXY, x_forwarded_host="evil.example, pub.example:8443") == "http://pub.example:8443"
    assert url_of(tmp_path, PROXY, x_forwarded_host="evil.example") == 403
    assert url_of(tmp_path, PROXY, x_forwarded_proto="gopher", x_forwarded_host="a/b") == "http://127.0.0.1:8000"
    assert url_of(tmp_path, PROXY, origin="https://pub.example", **said) == "https://pub.example"
    assert url_of(tmp_path, PROXY, origin="https://evil.example", **said) == 403


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1", "11.0.0.1", "testclient", ""])
def test_nobody_else_is_believed(tmp_path, address):
    """This machine neither, unless it is named: a page that found its way to it could say anything."""
    said = {"x_forwarded_proto": "https", "x_forwarded_host": "pub.example"}
    assert url_of(tmp_path, address, **said) == "http://127.0.0.1:8000"


def test_of_several_headers_each_must_be_the_servers_own():
    """A proxy before the server may have read any of them."""
    client = TestClient(make_app(FakeImageService(), LOOPBACK), base_url=f"http://{LOCAL}")
    ours, other = ("origin", f"http://{LOCAL}"), ("origin", "http://127.0.0.1:3000")
    for headers, status in (
        ([ours, ours], 200),
        ([("host", "LOCALHOST:80")], 200),
        ([ours, other], 403),
        ([other, ours], 403),
        ([("host", LOCAL), ("host", "127.0.0.1:3000"), ours], 403),
        ([("host", LOCAL), ("host", "evil.example")], 403),
        ([("host", "evil.example"), ("host", LOCAL)], 403),
    ):
        assert client.post(SLEEP, headers=headers).status_code == status


def test_the_proxys_own_routes_are_checked_alike():
    """They are answered before the application is asked."""
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    client = TestClient(OwnRoutesMiddleware(app, hosts=LOOPBACK_HOSTS), base_url=f"http://{LOCAL}")
    assert client.post("/-/healthz", headers={"origin": "http://127.0.0.1:3000"}).status_code == 403
    assert client.get("/-/healthz", headers={"origin": "http://127.0.0.1:3000"}).status_code == 200
    assert client.post("/-/healthz", headers={"origin": f"http://{LOCAL}"}).status_code == 200
    assert reached == ["/-/healthz"] * 2
