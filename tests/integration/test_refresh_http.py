"""An update published over HTTP and from the command line, to workers that serve requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.main import main
from plait_disagg.package.manifest import read_manifest
from plait_disagg.package.read import Package, open_package
from plait_disagg.refresh.errors import NotPublished
from plait_disagg.refresh.publish import publish
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from plait_serving.sections import Role
from support import refresh as kit
from support.app_server import AppServer
from support.asking import ask
from support.http_rank import as_json
from support.keys import api_key
from support.rank_fabric import Rig

FILE = Path(kit.__file__)
KEYS = (api_key("boss", tenant="t", role=Role.ADMIN), api_key("guest", tenant="t"))


class Local:
    """Publishes to workers in this process."""

    def __init__(self, package: Package, workers: kit.RoleWorkersInProcess) -> None:
        self._package, self._workers = package, workers
        self.error: Exception | None = None

    async def refresh(self, update: Path) -> str:
        """See `ServedRanker`."""
        if self.error is not None:
            raise self.error
        return await asyncio.to_thread(publish, self._package, update, (self._workers,))


class Server:
    """The model `parts`, whole, and `still`, the same one that nothing refreshes."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.whole = kit.Whole(rig, folder)
        self.refreshes = Local(self.whole.package, self.whole.workers)
        models = {
            "parts": ServedRanker(ranker=self.whole.ranker, refresh=self.refreshes.refresh),
            "still": ServedRanker(ranker=self.whole.ranker),
        }
        self.http = AppServer(create_app(None, HttpSettings(api_keys=KEYS), ranking=LocalRankingService(models)))
        self.url = f"http://127.0.0.1:{self.http.port}"

    def call(self, path: str, body: Any = None, *, key: str = "boss") -> tuple[int, Any]:
        """Status and JSON; a body makes it a POST."""
        answer = ask(self.url + path, body, headers={"authorization": f"Bearer {key}"})
        return answer.status, answer.json()

    def load(self, update: Path, *, model: str = "parts", key: str = "boss") -> tuple[int, Any]:
        """Publishes an update."""
        return self.call(f"/v2/repository/models/{model}/load", {"parameters": {"update": str(update)}}, key=key)

    def infer(self, path: str = "/v2/models/parts/infer") -> tuple[int, Any]:
        """The answer to request 0."""
        tensors = kit.request(self.whole.package, 0).tensors
        return self.call(path, as_json(tensors))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Packaged once."""
    return kit.packaged(tmp_path_factory.mktemp("refresh") / "parts")


@pytest.fixture
def server(template: Package, tmp_path: Path) -> Iterator[Server]:
    """Running, at version 1."""
    with Rig() as rig:
        made = Server(rig, kit.copied(template, tmp_path / "parts"))
        yield made
        made.http.stop()


def test_what_is_refused_over_http(server, tmp_path):
    """A bad update by its field, a body that says something else, a model that stays as it is, a key that may not; and
    the old version is served on."""
    good = kit.written(tmp_path / "u", kit.update(server.whole.package, "1", "2", seed=2))
    (good / "rows.safetensors").write_bytes(b"spoilt")
    status, answer = server.load(good)
    assert status == 400
    assert "update.json.files.rows.safetensors" in answer["error"]
    assert server.load(tmp_path / "nowhere")[0] == 400
    assert server.load(good, model="still")[0] == 400
    assert server.load(good, model="nobody")[0] == 404
    assert server.load(good, key="guest")[0] == 403
    for body in ({}, {"parameters": {}}, {"parameters": {"update": 7}}, {"parameters": {"update": "x", "more": 1}}):
        assert server.call("/v2/repository/models/parts/load", body)[0] == 400
    server.refreshes.error = NotPublished("a CN does not answer")
    assert server.load(good)[0] == 503
    assert server.infer()[1]["model_version"] == "1"


def test_from_a_retrained_model_to_the_running_server(server, tmp_path, capsys):
    """`plait models update`, `refresh` and `fold`, as their help says. Answers, metadata and versioned paths all say
    the new version; the old one is gone."""
    assert server.infer()[1]["model_version"] == "1"
    package, update = str(server.whole.package.folder), str(tmp_path / "u")
    assert main(["models", "update", package, f"{FILE}:make", "-o", update, "--version", "2"]) == 0
    assert capsys.readouterr().out == f"{update}\n"
    assert main(["models", "refresh", "parts", update, "--url", server.url, "--api-key", "boss"]) == 0
    assert capsys.readouterr().out == "parts is at version 2\n"
    status, answer = server.infer("/v2/models/parts/versions/2/infer")
    assert (status, answer["model_version"]) == (200, "2")
    assert server.call("/v2/models/parts")[1]["versions"] == ["2"]
    assert server.infer("/v2/models/parts/versions/1/infer")[0] == 404
    assert main(["models", "fold", package, "-o", str(tmp_path / "folded")]) == 0
    assert read_manifest(tmp_path / "folded").version == "2"
    twin = open_package(tmp_path / "folded")
    scores = kit.scores(twin, kit.request(twin, 0))
    torch.testing.assert_close(torch.tensor(answer["outputs"][0]["data"]), scores)


MISTAKES = {
    "refresh parts {update} --url {url} --api-key guest": "admin",
    "refresh parts {update} --url {url}": "--api-key",
    "refresh nobody {update} --url {url} --api-key boss": "nobody",
    "refresh parts {update} --url http://127.0.0.1:1": "127.0.0.1:1",
    "refresh parts {update} --url parts": "is not http",
    "refresh parts {update} --url {url} --api-key boss\r": "a character that no header may",
    "refresh parts {update} --url http://127.0.0.1:port": "is not http",
    "refresh parts {update} --url {url}/no/such --api-key boss": "answered 404",
    "update {package} {file}:module -o {out} --version 2": "must return",
    "update {package} {file}:make -o {package} --version 2": "exists already",
    "fold {package} -o {package}": "exists already",
    "fold {out} -o {out}": "no packaged model",
}


def test_the_commands_say_what_is_wrong(server, tmp_path, capsys):
    """In one sentence, with exit code 1."""
    package, out = server.whole.package, tmp_path / "out"
    update = kit.written(tmp_path / "u", kit.update(package, "1", "2", seed=2))
    words = {"update": update, "url": server.url, "package": package.folder, "file": FILE, "out": out}
    for line, told in MISTAKES.items():
        assert main(["models", *(word.format(**words) for word in line.split(" "))]) == 1, line
        assert told in capsys.readouterr().err, line
    assert server.infer()[1]["model_version"] == "1"
