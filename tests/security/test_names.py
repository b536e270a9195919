"""Names that clients send: paths and addresses in other servers, entries of a list here."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from fakes.ranking import fake_rankers
from fakes.trap import Trap
from fakes.tuning_desk import LocalTuningService, Threads, desk_in
from plait.config import PlaitConfig, ServerSection
from plait.deployments import http_settings
from plait.tuning.service.http import tuning_router
from plait_disagg.package.read import Package
from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge.hosts import LOOPBACK_HOSTS
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from plait_serving.sections import Role
from support import refresh as kit
from support.loras import tiny_lora_file
from support.rank_fabric import Rig

IMAGES = "/v1/images/generations"
EDITS = "/v1/images/edits"
PATHS = (
    "../../../../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "..\\..\\windows",
    "%2e%2e%2fetc%2fpasswd",
    "..%2f..%2fetc%2fpasswd",
    "noto/../noto",
    "noto\x00.safetensors",
    "~root",
    "file:///etc/passwd",
    "http://127.0.0.1/x",
    "noto\n",
)
NAMES_OF_LORAS = ("%2e%2e%2fetc%2fpasswd", "..%2f..%2fetc%2fpasswd", "~root")
"""Those of them that a LoRA may have: there is just none of that name."""


def server_of_everything(tmp_path: Path, settings: HttpSettings) -> TestClient:
    desk = desk_in(tmp_path / "jobs", Threads())
    routers = (tuning_router(LocalTuningService(desk)),)
    ranking = LocalRankingService(fake_rankers())
    app = create_app(FakeImageService(), settings, ranking=ranking, routers=routers)
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    return server_of_everything(tmp_path, HttpSettings())


@pytest.mark.parametrize("name", PATHS)
def test_cve_2026_7302_and_cve_2026_7304_traversal_in_a_body(client: TestClient, name: str) -> None:
    """SGLang stored uploads under the names that they came with: names in a body are compared with those that there
    are, and nothing is stored."""
    for field in ("loras", "controlnets"):
        item = {"name": name} | ({"image": "AAAA"} if field == "controlnets" else {})
        answer = client.post(IMAGES, json={"prompt": "x", field: [item]})
        is_unknown = field == "loras" and name in NAMES_OF_LORAS
        assert answer.status_code == (404 if is_unknown else 400)
        assert answer.json()["error"]["code"] == ("lora_not_found" if is_unknown else "invalid_value")
        assert answer.json()["error"]["param"] == f"{field}.0.name"
    image = {"name": "edges", "image": "AAAA", "preprocess": name}
    assert client.post(IMAGES, json={"prompt": "x", "controlnets": [image]}).status_code == 400
    assert client.post(IMAGES, json={"prompt": "x", "model": name}).status_code in (400, 404)
    body = {"model": name, "user": {}, "candidates": []}
    assert client.post("/v1/recommend", json=body).status_code == 404


@pytest.mark.parametrize("name", PATHS)
def test_cve_2026_56671_and_cve_2026_123790_traversal_in_a_path(client: TestClient, name: str) -> None:
    """ComfyUI's previews, and a node of its users, opened what the path of a request said: here it finds a model, a
    version or a job by its name, or nothing."""
    for spelled in {urllib.parse.quote(name, safe=""), urllib.parse.quote(name)}:
        for path in (
            f"/v1/models/{spelled}",
            f"/v2/models/{spelled}",
            f"/v2/models/{spelled}/ready",
            f"/v2/models/picks/versions/{spelled}/example",
            f"/v1/tuning/jobs/{spelled}",
            f"/v1/tuning/jobs/{spelled}/report",
            f"/v1/tuning/jobs/{spelled}/events",
            f"/{spelled}",
        ):
            answer = client.get(path)
            was_resolved = answer.url.path != urllib.parse.unquote(path)  # by the client: dots of a path are its own
            assert answer.status_code == 404 or was_resolved, path
            assert "root:" not in answer.text


def test_cve_2026_56671_links_and_paths_of_a_lora_folder(tmp_path: Path) -> None:
    """The folder itself gives no file from outside, whoever asks, and follows no link that leads out."""
    outside = tiny_lora_file(tmp_path, "secret", seed=1)
    path = tmp_path / "secret.safetensors"
    assert path.is_file(), outside
    folder = tmp_path / "loras"
    tiny_lora_file(folder, "noto", seed=2)
    (folder / "linked.safetensors").symlink_to(path)
    (folder / "linked").symlink_to(tmp_path)
    source = FolderSource(folder)
    assert list(source.names()) == ["noto"]
    for name in (*PATHS, "../secret", "linked", "linked/secret"):
        assert source.find(name) is None
        with pytest.raises(NotFound):
            source.fetch(name)


# ---- models by address -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return kit.packaged(tmp_path_factory.mktemp("registered") / "parts")


@pytest.fixture
def refreshed(template: Package, tmp_path: Path) -> Iterator[TestClient]:
    """A server with a real model that can be refreshed."""
    with Rig() as rig:
        whole = kit.Whole(rig, kit.copied(template, tmp_path / "parts"))
        models = {"parts": ServedRanker(ranker=whole.ranker, refresh=whole.publish)}
        app = create_app(None, HttpSettings(), ranking=LocalRankingService(models))
        yield TestClient(app, raise_server_exceptions=False)


def test_cve_2023_43654_and_cve_2024_35198_a_model_by_its_url(refreshed: TestClient, tmp_path: Path) -> None:
    """TorchServe fetched and ran what an address named (ShellTorch), and its allow-list could be got round: here an
    update is a folder of this machine, whose every file is checked, and a URL names none."""
    trap = Trap()
    try:
        for scheme in ("http", "HTTP", "https", "ftp", "file", "s3"):
            url = f"{scheme}://127.0.0.1:{trap.port}/../model.mar"
            body = {"parameters": {"update": url}}
            answer = refreshed.post("/v2/repository/models/parts/load", json=body)
            assert answer.status_code == 400
            assert "is refused" in answer.json()["error"]
        for path in ("/models?url=http://127.0.0.1:{}/m.mar", "/v2/repository/models/new/load"):
            assert refreshed.post(path.format(trap.port), json={"parameters": {"update": "x"}}).status_code == 404
        assert not trap.was_called()
    finally:
        trap.close()
    assert refreshed.get("/v2/models/parts").json()["versions"] == ["1"]


def test_cve_2023_43654_an_update_that_is_code(refreshed: TestClient, tmp_path: Path) -> None:
    """A folder with a handler is no update, and the handler stays a file."""
    update = tmp_path / "update"
    update.mkdir()
    (update / "handler.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (update / "update.json").write_text(json.dumps({"handler": "handler.py", "model": "parts"}))
    body = {"parameters": {"update": str(update)}}
    assert refreshed.post("/v2/repository/models/parts/load", json=body).status_code == 400
    assert not (tmp_path / "ran").exists()


# ---- what cannot be done over HTTP at all ----------------------------------------------------------------------------


def _operations(client: TestClient) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in client.get("/openapi.json").json()["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def test_cve_2025_67303_and_cve_2026_22777_installation_over_http(client: TestClient) -> None:
    """ComfyUI's manager installed plugins and changed its settings over HTTP, and ComfyUI's instances were taken over
    by botnets: whatever here changes anything is named here, and all of it but images and rankings needs an admin."""
    changing = {(method, path) for method, path, _ in _operations(client) if method != "get"}
    assert changing == {
        ("post", "/v1/images/control_maps"),
        ("post", "/v1/images/edits"),
        ("post", "/v1/images/generations"),
        ("post", "/v1/models/{model_id}/sleep"),
        ("post", "/v1/models/{model_id}/wake"),
        ("post", "/v1/recommend"),
        ("post", "/v1/tuning/jobs"),
        ("post", "/v1/tuning/jobs/{job_id}/cancel"),
        ("post", "/v2/models/{model}/infer"),
        ("post", "/v2/models/{model}/versions/{version}/infer"),
        ("post", "/v2/repository/models/{model}/load"),
    }


def test_a1111_open_by_default() -> None:
    """A1111's web UI asks for no key, and whoever reaches it may install extensions, which are code: here nobody else
    reaches a server that was not told so, and one that others reach has no admin without a key."""
    server = PlaitConfig().server
    assert server.host == "127.0.0.1"
    assert (server.is_open, server.has_admin) == (False, True)
    exposed = ServerSection(host="0.0.0.0")
    assert (exposed.is_open, exposed.has_admin) == (True, False)
    assert http_settings(exposed).anyone.role is Role.USER


def test_cve_2024_47874_and_va_26_238_01_only_edits_take_a_form_or_a_file(client: TestClient) -> None:
    """Starlette kept the parts of a form in memory without bound: one route reads forms, whose bytes and parts are
    bounded, and one that is sent elsewhere costs no more than its bytes."""
    for _, path, operation in _operations(client):
        kinds = operation.get("requestBody", {}).get("content", {})
        takes_forms = any(kind.startswith(("multipart/", "application/x-www-form")) for kind in kinds)
        assert takes_forms == (path == EDITS), path
    field = b'--x\r\nContent-Disposition: form-data; name="a%d"\r\n\r\n1\r\n'
    for content, status in (
        (b"".join(field % i for i in range(10_000)) + b"--x--\r\n", 400),
        (field % 1 + b"a" * (HttpSettings().max_body_bytes + 1), 413),
        (b"--x\r\n" + b"a: b\r\n" * 100_000, 400),
    ):
        answer = client.post(EDITS, content=content, headers={"content-type": "multipart/form-data; boundary=x"})
        assert answer.status_code == status, answer.text
    form = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"a" * 4_000_000 + b"\r\n--x--\r\n"
    for kind in ("multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
        answer = client.post(IMAGES, content=form, headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
        answer = client.post("/v1/tuning/jobs", content=form, headers={"content-type": kind})
        assert answer.status_code == 415


def test_cve_2025_62727_ranges(client: TestClient) -> None:
    """Starlette took quadratic time to merge the ranges of a file: no route serves files, and ranges are ignored."""
    ranges = "bytes=" + ",".join(f"{i}-{i + 1}" for i in range(0, 60_000, 3))
    for method, path, _ in _operations(client):
        if method == "get" and "{" not in path:
            answer = client.get(path, headers={"range": ranges})
            assert answer.status_code == 200
            assert "content-range" not in answer.headers


def test_cve_2025_62593_dns_rebinding(tmp_path: Path) -> None:
    """A web page could point its own name at 127.0.0.1 and drive Ray's dashboard: a server on loopback answers to its
    own names only, on every route, and changes nothing for a page of another name or port."""
    client = server_of_everything(tmp_path, HttpSettings(allowed_hosts=LOOPBACK_HOSTS))
    for method, path, _ in _operations(client):
        answer = client.request(method, path, headers={"host": "evil.example:8000"}, content=b"{}")
        assert (answer.status_code, "allowed_hosts" in answer.text) == (403, True), path
        for origin in ("http://evil.example", "null", "http://127.0.0.1.evil.example:8000", "https://evil.example",
                       "http://127.0.0.1:3000", "http://localhost:8000"):  # fmt: skip
            simple = {"origin": origin, "content-type": "text/plain"}
            answer = client.request(method, path, headers=simple, content=b"{}")
            assert "access-control-allow-origin" not in answer.headers
            assert (answer.status_code == 403) == (method != "get"), path
        silent = {"sec-fetch-site": "same-site", "content-type": "text/plain"}
        answer = client.request(method, path, headers=silent, content=b"{}")
        assert (answer.status_code == 403) == (method != "get"), path
    own = client.post(IMAGES, json={"prompt": "x"}, headers={"origin": "http://127.0.0.1:8000"})
    assert own.status_code == 200
    assert client.options("/v1/models", headers={"origin": "http://evil.example"}).status_code == 405
